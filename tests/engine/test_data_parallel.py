"""Two data-parallel engines behind one server: each has its own CPU tier, Redis is shared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.engines.api_server import ApiServer, running_api
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer, random_prompt
from tests.support.redis.servers import Server

PROMPT_TOKENS, FULL_CHUNKS = 1500, 5
pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def api(
    tiny_model: Path, valkey: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    log = tmp_path_factory.mktemp("data-parallel") / "log"
    transfer = kv_transfer(redis_url=valkey.url)
    with running_api(tiny_model, transfer, log, "--data-parallel-size", "2") as api:
        yield api


def hit_tokens(api: ApiServer, rank: int) -> float:
    return api.metric("vllm:external_prefix_cache_hits_total", f'engine="{rank}"')


def text(api: ApiServer, prompt: list[int], rank: int) -> str:
    answer = json.loads(api.complete(prompt, data_parallel_rank=rank))
    return str(answer["choices"][0]["text"])


def test_an_engine_loads_another_ones_chunks(api: ApiServer) -> None:
    prompt = random_prompt(1, PROMPT_TOKENS)
    cold = text(api, prompt, rank=0)
    api.settle(lambda: api.metric("vllm:lmcache_written_chunks_total") >= FULL_CHUNKS)
    assert hit_tokens(api, 0) == hit_tokens(api, 1) == 0

    assert text(api, prompt, rank=1) == cold
    assert hit_tokens(api, 0) == 0
    assert hit_tokens(api, 1) == FULL_CHUNKS * CHUNK_SIZE


def test_each_engine_keeps_its_own_cpu_tier(api: ApiServer) -> None:
    prompt = random_prompt(2, PROMPT_TOKENS)
    for rank in (0, 1):
        hits = partial(api.metric, "vllm:lmcache_hit_tokens_total", f'engine="{rank}"')
        cold, before = text(api, prompt, rank), hits('tier="cpu"')
        api.forget()
        assert text(api, prompt, rank) == cold
        assert hits('tier="cpu"') == before + FULL_CHUNKS * CHUNK_SIZE
