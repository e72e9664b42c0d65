"""A prompt that is handed over is loaded up to its last token but one, on one engine: stored for
another, forgotten by vLLM, and loaded as if another had computed it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.calls import check_integrity, forget_unseen, wait_for_writes
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.layer_digests import differences
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer, tiered_transfer
from tests.support.engines.tiny_drafters import build_drafted
from tests.support.engines.tiny_families import FAMILIES, build_family
from tests.support.engines.transfers import (
    CONSUMED,
    assert_handed_over,
    produced,
    transfer,
)
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server

OTHER_WINDOWS = ("gemma4", "gpt-oss", "llama4")
LENGTHS = (2, 127, 128, 129, 300, CHUNK_SIZE, CHUNK_SIZE + 1, 3001)


@pytest.fixture(scope="module")
def engine(start: StartInstance) -> Iterator[VllmInstance]:
    with start(kv_transfer(), max_num_batched_tokens=512) as instance:
        yield instance
        instance.call(check_integrity)


@pytest.mark.parametrize("length", LENGTHS)
def test_all_but_the_last_token_is_loaded(engine: VllmInstance, length: int) -> None:
    assert_handed_over(engine, length, length)


@pytest.mark.parametrize("length", [2 * CHUNK_SIZE - 1])
def test_what_follows_a_tail_is_stored(engine: VllmInstance, length: int) -> None:
    """Whole chunks, the one with the tail among them, as if all had been computed."""
    prompt = random_prompt(60 + length, length)
    produced(engine, prompt)
    answer = 2 * CHUNK_SIZE
    engine.call(transfer, prompt, CONSUMED, answer)
    engine.reset_prefix_cache()
    served = engine.serve(prompt, answer, skip_reading_prefix_cache=True)
    engine.reset_prefix_cache()
    turn = [*prompt, *served.token_ids, 5]
    cold = engine.serve(turn, skip_reading_prefix_cache=True)
    engine.reset_prefix_cache()
    hit = engine.serve(turn)
    assert hit.external_hit_tokens == (length + answer - 1) // CHUNK_SIZE * CHUNK_SIZE
    assert hit.token_ids == cold.token_ids


def test_by_redis(start: StartInstance, valkey: Server) -> None:
    redis = kv_transfer(redis_url=valkey.url)
    with start(redis) as engine:
        for seed, length in enumerate((2, 300, 1000)):
            prompt = random_prompt(80 + seed, length)
            cold = produced(engine, prompt)
            engine.call(wait_for_writes)
            engine.call(forget_unseen)
            engine.serve([3, 4, 5])  # tells the scheduler's side
            loaded, digests = engine.call(transfer, prompt, CONSUMED)
            assert (loaded, differences(digests, cold)) == (length - 1, [])
        engine.call(check_integrity)


@pytest.mark.parametrize(
    "name",
    # An engine each; how a window ends with a tail is tests/scheduler/test_tails.py's as well.
    ["gemma3 5:1", *(pytest.param(name, marks=pytest.mark.soak) for name in OTHER_WINDOWS)],
)
def test_windows(start: StartInstance, name: str, tmp_path: Path) -> None:
    folder = build_family(name, tmp_path)
    assert_family(start, folder, {"max_num_batched_tokens": 512} | FAMILIES[name].engine_args)


@pytest.mark.soak  # an engine each; tests/scheduler/test_tails.py has a head that looks ahead
@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
def test_with_a_drafter(start: StartInstance, kind: str, tmp_path: Path) -> None:
    folder, args = build_drafted(kind, tmp_path)
    assert_family(start, folder, {"max_num_batched_tokens": 512} | args)


def assert_family(start: StartInstance, folder: Path, args: dict[str, Any]) -> None:
    settings = tiered_transfer(cpu_gib=0.25, compute_or_load="always", audit_share=0.0)
    with start(settings, folder, **args) as engine:
        for length in (2, 127, 129, 300, 3001):
            assert_handed_over(engine, length, length)
        engine.call(check_integrity)
