"""Engines with ``LMCacheMPConnector``, whose servers share our Redis tier."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.connectors import let_numba_come_early, lmcache_server
from tests.neighbours.test_lmcache_l2 import adapter_config
from tests.support.engines.instance import StartInstance
from tests.support.engines.probe import Served
from tests.support.engines.settings import BLOCK_SIZE
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server
from tests.support.redis.values import wait_for_values

LMCACHE_CHUNK = 256
NUM_CHUNKS = 4
PROMPT = random_prompt(23, NUM_CHUNKS * LMCACHE_CHUNK + 10)


def serve_once(start: StartInstance, redis: Server, folder: Path) -> Served:
    """By a new engine with a server of its own, both of which know nothing yet."""
    folder.mkdir()
    adapter = json.dumps(adapter_config(redis.url))
    with (
        lmcache_server(folder / "server.log", 1.0, "--l2-adapter", adapter) as transfer,
        start(transfer, prepare=let_numba_come_early) as engine,
    ):
        served = engine.serve(PROMPT)
        wait_for_values(redis, NUM_CHUNKS)
    return served


def test_an_engine_finds_what_anothers_server_stored(
    start: StartInstance, valkey: Server, tmp_path: Path
) -> None:
    cold = serve_once(start, valkey, tmp_path / "one")
    assert cold.cached_tokens == 0
    warm = serve_once(start, valkey, tmp_path / "other")
    assert warm.cached_tokens == NUM_CHUNKS * LMCACHE_CHUNK
    num_blocks = NUM_CHUNKS * LMCACHE_CHUNK // BLOCK_SIZE
    assert warm.block_digests[:num_blocks] == cold.block_digests[:num_blocks]
    assert len(set(cold.block_digests)) == num_blocks
