"""Tested versions of vLLM share chunks; an untested one has its own namespace, and logs so once."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    PATIENT,
    kv_transfer,
    random_prompt,
)
from tests.support.redis.servers import Server, running_valkey, value_names, wait_for_values

LIMITS = PATIENT

NUM_HEADS = 4
NUM_TOKENS = 4 * CHUNK_SIZE + 5
HIT = 4 * CHUNK_SIZE
ENGINE: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 2048}


def pretend(folder: str) -> None:
    """Put ``folder`` before the installed packages."""
    sys.path.insert(0, folder)


@pytest.fixture
def newer(tmp_path: Path) -> str:
    """Metadata of a vLLM not released yet; its code is the installed one's."""
    folder = tmp_path / "newer"
    metadata = folder / "vllm-0.99.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0+cpu\n")
    return str(folder)


def namespaces(server: Server) -> set[str]:
    """The namespaces of all chunks on the server."""
    return {name[len("lmc:{") :].decode().split(":")[0] for name in value_names(server)}


def test_an_unverified_vllm_runs_apart(start: StartInstance, valkey: Server, newer: str) -> None:
    transfer = kv_transfer(redis_url=valkey.url)
    prompt = random_prompt(18, NUM_TOKENS)
    with start(transfer, **ENGINE) as tested:
        tested.serve(prompt)
        wait_for_values(valkey, HIT // CHUNK_SIZE * NUM_HEADS)
        assert "self-test passed" in tested.log
        assert "was not tested" not in tested.log
    assert namespaces(valkey) == {"default"}
    with start(transfer, prepare=partial(pretend, newer), **ENGINE) as unverified:
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


OLDEST = ROOT / ".cache" / "matrix" / "vllm-0.31.0"


class Spawned(VllmInstance):
    """Imports vLLM itself, from this process' current path."""

    context = multiprocessing.get_context("spawn")


def vllm_version(probe: EngineProbe) -> str:
    import vllm

    return str(vllm.__version__)


@contextmanager
def laid_over(folder: Path | None) -> Iterator[None]:
    """New processes import the vLLM in ``folder``; ``None``: the environment's."""
    path = [each for each in sys.path if Path(each).resolve() != OLDEST.resolve()]
    first = [] if folder is None else [str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*first, *path])
        # vLLM inspects models in further processes.
        patch.setenv("PYTHONPATH", os.pathsep.join(first))
        yield


@pytest.mark.skipif(not OLDEST.is_dir(), reason="make matrix lays it out, and runs this")
def test_the_oldest_and_the_newest_share(tiny_model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        valkey = stack.enter_context(running_valkey())
        transfer = kv_transfer(redis_url=valkey.url)
        instances = []
        for name, folder in (("oldest", OLDEST), ("newest", None)):
            with laid_over(folder):
                instance = Spawned(tiny_model, transfer, tmp_path / name, limits=LIMITS, **ENGINE)
                instances.append(stack.enter_context(instance))
        versions = [instance.call(vllm_version) for instance in instances]
        assert len(set(versions)) == 2
        assert versions[0].startswith("0.31.0")
        for seed, (writer, reader) in enumerate(permutations(instances)):
            prompt = random_prompt(seed, NUM_TOKENS)
            cold = writer.serve(prompt)
            assert cold.external_hit_tokens == 0
            wait_for_values(valkey, (seed + 1) * HIT // CHUNK_SIZE * NUM_HEADS)
            hit = reader.serve(prompt)
            assert hit.external_hit_tokens == HIT
            num_blocks = HIT // BLOCK_SIZE
            assert hit.block_digests[:num_blocks] == cold.block_digests[:num_blocks]
