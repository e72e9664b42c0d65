"""Every value in Redis is damaged: hits are what was loaded, not what was planned."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.tiny_model import ModelShape
from tests.support.command_line import call_cli
from tests.support.engines.api_server import running_api
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

FULL_CHUNKS = 5
PROMPT = random_prompt(1, FULL_CHUNKS * CHUNK_SIZE + 200)
PLANNED = FULL_CHUNKS * CHUNK_SIZE


SMALLEST_VALUE = 1024  # bytes; a claim of a writer has the name of its value and is smaller


def values(valkey: Server) -> list[bytes]:
    """The names of all values but those that measure Redis."""
    with valkey.client() as client:
        names = [name for name in client.keys("lmc:*-*") if b"{default:0000" not in name]
        return [name for name in names if client.strlen(name) > SMALLEST_VALUE]


def test_a_hit_that_was_lost_is_no_hit(valkey: Server, tiny_model: Path, tmp_path: Path) -> None:
    transfer = kv_transfer(redis_url=valkey.url)
    with running_api(tiny_model, transfer, tmp_path / "writer") as writer:
        cold = json.loads(writer.complete(PROMPT))["choices"][0]["text"]
        writer.settle(lambda: len(values(valkey)) >= FULL_CHUNKS * ModelShape().num_kv_heads)
    names = values(valkey)
    with valkey.client() as client:
        for name in names:
            last = client.strlen(name) - 1
            client.setrange(name, last, bytes([client.getrange(name, last, last)[0] ^ 1]))

    with running_api(tiny_model, transfer, tmp_path / "reader") as reader:
        assert json.loads(reader.complete(PROMPT))["choices"][0]["text"] == cold
        recomputed = "vllm:lmcache_recomputed_tokens_total"
        reader.settle(
            lambda: (
                reader.metric(recomputed) == PLANNED
                and re.search(r"removed \d+ values", reader.log) is not None
            )
        )
        (found,) = call_cli("stats", reader.address, "--json").document["engines"]
        people = call_cli("stats", reader.address).out
        hits = "vllm:external_prefix_cache_hits_total"
        assert reader.metric(hits) == PLANNED, "vLLM counts plans: say so in docs/metrics.md"
    assert found["hit_tokens"] == {"cpu": 0, "redis": PLANNED}
    assert found["hit_rate"] == 0
    assert "hit rate 0.0% of " in people
    assert f"; {PLANNED:,} more were to be loaded, lost and recomputed" in people
    # vLLM leaves lines of seconds out in which no token was computed.
    lines = re.findall(r"KV Transfer metrics: hit tokens=(\d+) of \d+", reader.log)
    assert set(lines) <= {"0"}
    (removed,) = re.findall(r"WARNING.*removed (\d+) values", reader.log)
    assert 1 < int(removed) <= len(names)
