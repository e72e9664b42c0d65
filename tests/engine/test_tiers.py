"""One prompt through all tiers of real engines, and transferred from one request to another.

Tests compare bytes. The connector's count of loaded tokens proves that the cache was used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from examples.tiny_model import TINY
from tests.support.engines.calls import (
    CONSUMED,
    assert_handed_over,
    check_integrity,
    forget,
    produced,
    reset_everything,
    transfer,
    wait_for_writes,
)
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.kv_digests import differences
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import BLOCK_SIZE, CHUNK_SIZE, kv_transfer, random_prompt
from tests.support.redis.servers import Server, value_names, wait_for_values


@pytest.fixture(scope="module")
def writer(start: StartInstance, valkey: Server) -> Iterator[VllmInstance]:
    """An engine that computes long prompts in several steps, and tells routers of its blocks."""
    from vllm.config.kv_events import KVEventsConfig

    more: dict[str, Any] = {"max_num_batched_tokens": 512, "scheduling_policy": "priority"}
    more["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with start(kv_transfer(redis_url=valkey.url), **more) as instance:
        instance.serve(random_prompt(0, 300))
        yield instance


def assert_loaded(hit: Served, cold: Served, num_tokens: int) -> None:
    """``num_tokens`` came from the connector, and all blocks before their end equal the cold
    run's."""
    assert hit.external_hit_tokens == num_tokens
    blocks = hit.cached_tokens // BLOCK_SIZE
    assert blocks > 0
    assert hit.block_digests[:blocks] == cold.block_digests[:blocks]


@pytest.mark.parametrize("num_tokens", [10, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 512, 1500])
def test_a_prompt_is_loaded_from_the_cpu_tier(writer: VllmInstance, num_tokens: int) -> None:
    prompt = random_prompt(1000 + num_tokens, num_tokens)
    cold = writer.serve(prompt)
    assert cold.external_hit_tokens == 0
    writer.reset_prefix_cache()
    hit = writer.serve(prompt)
    loaded = num_tokens // CHUNK_SIZE * CHUNK_SIZE
    assert hit.external_hit_tokens == loaded
    assert hit.token_ids[0] == cold.token_ids[0]
    # vLLM computes the last token of a fully cached prompt again, into its last block.
    blocks = min(loaded, num_tokens - 1) // BLOCK_SIZE
    assert hit.block_digests[:blocks] == cold.block_digests[:blocks]
    writer.call(check_integrity)


def last_step_then_reset(probe: EngineProbe, prompt: list[int]) -> Served:
    """The order of ``LLM.generate`` and ``LLM.reset_prefix_cache``: no step between the two, and
    the reset comes before the store begins."""
    request_id = probe.add(prompt, max_tokens=1)
    probe.finish([request_id], 0.0, drain=False)
    assert probe.engine.reset_prefix_cache()
    return probe.serve(prompt)


def test_chunks_of_the_last_step_are_stored_before_a_reset(writer: VllmInstance) -> None:
    prompt = random_prompt(4, 1100)
    hit = writer.call(last_step_then_reset, prompt)
    assert_loaded(hit, writer.serve(prompt, skip_reading_prefix_cache=True), 1024)
    writer.call(check_integrity)


def test_a_hit_that_begins_inside_a_chunk(writer: VllmInstance) -> None:
    prompt = random_prompt(3, 1500)
    cold = writer.serve(prompt)
    writer.reset_prefix_cache()
    writer.serve([*prompt[:BLOCK_SIZE], 7])  # vLLM has half of the first chunk
    hit = writer.serve(prompt)
    assert_loaded(hit, cold, 1280 - BLOCK_SIZE)
    assert hit.cached_tokens == 1280


def test_a_reset_of_external_caches_keeps_chunks_of_the_same_weights(writer: VllmInstance) -> None:
    prompt = random_prompt(32, 700)
    writer.serve(prompt)
    writer.call(reset_everything)
    assert writer.serve(prompt).external_hit_tokens == 512


# -- transfers: stored for another request, dropped by vLLM, and loaded ----------------------------


@pytest.mark.parametrize("length", [2, 127, 128, 129, 300, CHUNK_SIZE, CHUNK_SIZE + 1, 3001])
def test_all_but_the_last_token_is_transferred(writer: VllmInstance, length: int) -> None:
    assert_handed_over(writer, length, length)


@pytest.mark.skipif(torch.cuda.is_available(), reason="another batch, another answer on a GPU")
def test_answers_to_a_tail_are_stored(writer: VllmInstance) -> None:
    length, answer = 2 * CHUNK_SIZE - 1, 2 * CHUNK_SIZE
    prompt = random_prompt(60, length)
    produced(writer, prompt)
    writer.call(transfer, prompt, CONSUMED, answer)
    writer.reset_prefix_cache()
    served = writer.serve(prompt, answer, skip_reading_prefix_cache=True)
    turn = [*prompt, *served.token_ids, 5]
    writer.reset_prefix_cache()
    cold = writer.serve(turn, skip_reading_prefix_cache=True)
    writer.reset_prefix_cache()
    hit = writer.serve(turn)
    assert hit.external_hit_tokens == (length + answer - 1) // CHUNK_SIZE * CHUNK_SIZE
    assert hit.token_ids == cold.token_ids


@pytest.mark.parametrize("length", [2, 300, 1000])
def test_redis_transfers_a_tail(writer: VllmInstance, length: int) -> None:
    prompt = random_prompt(80 + length, length)
    cold = produced(writer, prompt)
    writer.call(wait_for_writes)
    writer.call(forget)
    loaded, digests = writer.call(transfer, prompt, CONSUMED)
    assert (loaded, differences(digests, cold)) == (length - 1, [])


# -- another process -------------------------------------------------------------------------------


def end_after_the_last_step(probe: EngineProbe, prompt: list[int]) -> None:
    request_id = probe.add(prompt, max_tokens=1)
    probe.finish([request_id], 0.0, drain=False)
    probe.shutdown()


def test_another_process_loads_from_redis(
    writer: VllmInstance, start: StartInstance, valkey: Server
) -> None:
    prompt = random_prompt(40, 2000)
    cold = writer.serve(prompt)
    wait_for_values(valkey, len(cold.block_digests))
    with start(
        kv_transfer(redis_url=valkey.url),
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        async_scheduling=False,
    ) as reader:
        hit = reader.serve(prompt)
        assert_loaded(hit, cold, 2000 // CHUNK_SIZE * CHUNK_SIZE)
        again = reader.serve(prompt)  # from the CPU tier: vLLM's prefix cache is off
        assert_loaded(again, cold, 2000 // CHUNK_SIZE * CHUNK_SIZE)
        counts = reader.counts()
        assert counts.total("loaded_bytes", "cpu") > counts.total("loaded_bytes", "redis") > 0
        reader.call(check_integrity)
        before = len(value_names(valkey))
        reader.call(end_after_the_last_step, random_prompt(5, 1100))
        assert len(value_names(valkey)) - before >= 1024 // CHUNK_SIZE * TINY.num_kv_heads
