"""A vLLM that nobody has tested shares nothing with those that were, and says so once."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.engines.instance import VllmInstance
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server
from tests.support.redis.values import value_names, wait_for_values

NUM_HEADS = 4
NUM_TOKENS = 4 * CHUNK_SIZE + 5
HIT = 4 * CHUNK_SIZE
ENGINE = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 2048}


def pretend(folder: str) -> None:
    """What is installed is looked for there first."""
    sys.path.insert(0, folder)


@pytest.fixture
def newer(tmp_path: Path) -> str:
    """The metadata of a vLLM that is not out yet: its code is the installed one's."""
    folder = tmp_path / "newer"
    metadata = folder / "vllm-0.99.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0+cpu\n")
    return str(folder)


def namespaces(server: Server) -> set[str]:
    """Of all chunks that lie there."""
    return {name[len("lmc:{") :].decode().split(":")[0] for name in value_names(server)}


def test_an_unverified_vllm_runs_apart(
    tiny_model: Path, valkey: Server, newer: str, tmp_path: Path
) -> None:
    transfer = kv_transfer(redis_url=valkey.url, lookup_deadline_seconds=10.0, self_test=False)
    prompt = random_prompt(18, NUM_TOKENS)
    with VllmInstance(tiny_model, transfer, tmp_path / "tested", **ENGINE) as tested:
        tested.serve(prompt)
        wait_for_values(valkey, HIT // CHUNK_SIZE * NUM_HEADS)
        assert "self-test passed" not in tested.log
        assert "was not tested" not in tested.log
    assert namespaces(valkey) == {"default"}
    log = tmp_path / "unverified"
    with VllmInstance(tiny_model, transfer, log, partial(pretend, newer), **ENGINE) as unverified:
        cold = unverified.serve(prompt)
        assert cold.external_hit_tokens == 0
        wait_for_values(valkey, 2 * HIT // CHUNK_SIZE * NUM_HEADS)
        assert namespaces(valkey) == {"default", "default.unverified-0.99"}
        unverified.reset_prefix_cache()
        hit = unverified.serve(prompt)
        assert hit.external_hit_tokens == HIT
        assert hit.block_digests == cold.block_digests
        assert unverified.log.count("was not tested") == 1
        assert "self-test passed" in unverified.log
