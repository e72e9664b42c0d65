"""Beside vLLM: engines that nobody steps after ``generate()``, pauses, other connectors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engines.calls import check_integrity, chunk_keys, forget_unseen
from tests.support.engines.handover import Ask, ask
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer, together
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server
from tests.support.redis.slow_proxy import SlowLink, SlowProxy
from tests.support.redis.values import wait_for_chunks

NUM_TOKENS = 1300
FULL = NUM_TOKENS // CHUNK_SIZE * CHUNK_SIZE
NUM_HEADS = 4
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def link() -> SlowLink:
    return SlowLink()


@pytest.fixture(scope="module")
def slow_redis(valkey: Server, link: SlowLink) -> Iterator[SlowProxy]:
    proxy = SlowProxy(valkey.port, link)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module", params=["alone", "in MultiConnector"])
def instance(
    start: StartInstance, slow_redis: SlowProxy, request: pytest.FixtureRequest
) -> Iterator[VllmInstance]:
    """Scheduler and worker in one process. vLLM's policy for failed loads is its default."""
    tiered = kv_transfer(redis_url=slow_redis.url, load_deadline_seconds=1.0)
    transfer = tiered if request.param == "alone" else together(tiered)
    with start(transfer) as instance:
        instance.serve(random_prompt(0, 300))
        yield instance
        instance.call(at_rest)


def at_rest(probe: EngineProbe) -> None:
    probe.drain()
    check_integrity(probe)


def serve_from_redis_alone(probe: EngineProbe, prompt: list[int]) -> tuple[Served, str]:
    forget_unseen(probe)
    probe.serve([1] * 10)  # any step brings the news
    answer = ask(probe, Ask("late", prompt))
    return answer.served, answer.finish_reason


def test_a_missed_deadline_fails_no_request(
    instance: VllmInstance, link: SlowLink, valkey: Server
) -> None:
    """Whatever ``kv_load_failure_policy`` says: a late chunk is a miss, not a failed load."""
    prompt = random_prompt(3, NUM_TOKENS)
    cold = instance.serve(prompt)
    wait_for_chunks(valkey, instance.call(chunk_keys, prompt), NUM_HEADS)
    before = instance.counts()
    link.set(bytes_per_second=100e3)
    try:
        served, finish_reason = instance.call(serve_from_redis_alone, prompt)
    finally:
        link.set()
    after = instance.counts()
    assert after.total("load_jobs") > before.total("load_jobs")
    assert after.total("recomputed_tokens") > before.total("recomputed_tokens")
    assert finish_reason == "length"
    assert served.block_digests == cold.block_digests
