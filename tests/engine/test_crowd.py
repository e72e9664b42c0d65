"""A crowded engine: preemption, priorities, sessions, resets and pauses.

All tests share one engine, whose cache has 28 blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engines.calls import check_integrity, preemptions
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import BLOCK_SIZE, kv_transfer
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server

CHUNK_BYTES = 1 << 20
NUM_BLOCKS = 28


@pytest.fixture(scope="module")
def engine(start: StartInstance, valkey: Server) -> Iterator[VllmInstance]:
    from vllm.config.kv_events import KVEventsConfig

    with start(
        kv_transfer(redis_url=valkey.unix_url, cpu_gib=40 * CHUNK_BYTES / 2**30),
        kv_cache_memory_bytes=NUM_BLOCKS * CHUNK_BYTES // 2,
        max_model_len=2048,
        max_num_batched_tokens=512,
        scheduling_policy="priority",
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    ) as instance:
        yield instance
        instance.call(check_integrity)


def assert_blocks_equal(hit: Served, cold: Served) -> None:
    blocks = hit.cached_tokens // BLOCK_SIZE
    assert blocks > 0
    assert hit.block_digests[:blocks] == cold.block_digests[:blocks]


def serve_counting_preemptions(
    probe: EngineProbe, prompts: list[list[int]], max_tokens: int
) -> tuple[list[Served], list[str]]:
    """Serve ``prompts``; also returns the preempted requests in order."""
    with preemptions(probe) as preempted:
        return probe.serve_many(prompts, max_tokens), preempted


def test_requests_that_do_not_fit_are_preempted_and_lose_nothing(engine: VllmInstance) -> None:
    prompts = [random_prompt(seed, 700) for seed in range(6)]
    before = engine.counts()
    together, preempted = engine.call(serve_counting_preemptions, prompts, 150)
    assert len(preempted) > 0
    assert [len(served.token_ids) for served in together] == [150] * 6
    assert engine.counts().by_label("failed_loads") == before.by_label("failed_loads")
    engine.reset_prefix_cache()
    for prompt, cold in zip(prompts, together, strict=True):
        again = engine.serve(prompt)
        assert again.external_hit_tokens == 512
        assert_blocks_equal(again, cold)
    engine.call(check_integrity)


def reset_while_running(probe: EngineProbe, tokens: list[int], connector_too: bool) -> list[int]:
    """Drop all KV in the middle of an answer. Returns the answer."""
    request = probe.add(tokens, max_tokens=40)
    answer: list[int] = []
    for _ in range(8):
        probe.engine.step()
    probe.engine.engine_core.reset_prefix_cache(
        reset_running_requests=True, reset_connector=connector_too
    )
    while probe.engine.has_unfinished_requests():
        for output in probe.engine.step():
            assert output.request_id == request
            answer = list(output.outputs[0].token_ids)
    probe.drain()
    return answer


@pytest.mark.parametrize("connector_too", [False, True])
def test_a_reset_in_the_middle_of_an_answer(engine: VllmInstance, connector_too: bool) -> None:
    tokens = random_prompt(40 + connector_too, 700)
    cold = engine.serve(tokens)
    engine.reset_prefix_cache()
    answer = engine.call(reset_while_running, tokens, connector_too)
    assert len(answer) == 40
    assert answer[0] == cold.token_ids[0]
    engine.reset_prefix_cache()
    again = engine.serve(tokens)
    assert again.external_hit_tokens == 512  # stored again after the reset
    assert_blocks_equal(again, cold)
    engine.call(check_integrity)


def pause_and_resume(probe: EngineProbe, tokens: list[int], mode: str, level: int | None) -> int:
    """Pause (``level`` None) or sleep with a request under way. Returns its number of tokens."""
    probe.add(tokens, max_tokens=30)
    for _ in range(3):
        probe.engine.step()
    if level is None:
        probe.core.pause_scheduler(mode, clear_cache=False)
    else:
        probe.core.sleep(level, mode)
    for _ in range(3):
        probe.core.step_fn()
    if level is None:
        probe.core.resume_scheduler()
    else:
        probe.core.wake_up(["scheduling"])
    num_tokens = 0
    for _ in range(200):
        for output in probe.engine.step():
            num_tokens = len(output.outputs[0].token_ids)
        if not probe.scheduler.has_requests():
            break
    return num_tokens


@pytest.mark.parametrize("level", [None, 0])
@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_pause_and_sleep(engine: VllmInstance, mode: str, level: int | None) -> None:
    """Level 0 is the deepest sleep of an engine without a GPU."""
    tokens = random_prompt(50, 900)
    cold = engine.serve(tokens)
    engine.reset_prefix_cache()
    assert engine.call(pause_and_resume, tokens, mode, level) == (30 if mode == "keep" else 0)
    engine.reset_prefix_cache()
    again = engine.serve(tokens)
    assert again.external_hit_tokens == 768
    assert_blocks_equal(again, cold)
    engine.call(check_integrity)
