"""Steps: from which on requests have keys, what one costs, and what its plan says of prefill."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ModelConfig, VllmConfig

from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.plans import Fetched, PrefillWork, RankReport, RankStart, StepPlan, Tier
from lmcache_connector.scheduler.engine_start import EngineStart
from tests.support.clock import Clock
from tests.support.costs import product_frames
from tests.support.doubles.foreign_connector import Arrival, Offer
from tests.support.doubles.lives import prompt
from tests.support.doubles.shadow_config import build_scheduler
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE, VOCABULARY
from tests.support.doubles.shadow_worker import Faults
from tests.support.vllm_configs import engine_config

MEASURED = tuple((Fetched(Tier.CPU, rank + 1, 1.0),) for rank in range(3))


def make(world_size: int, clock: Clock | None = None) -> EngineStart:
    def make_hasher(configuration: object) -> PrefixHasher:
        return PrefixHasher({"configuration": configuration}, 16)

    return EngineStart(world_size, make_hasher, clock or Clock())


def report(rank: int, **configuration: str) -> RankReport:
    start = RankStart(tuple(sorted(configuration.items())), MEASURED[rank])
    return RankReport(rank, (), (), start=start)


def test_keys_are_those_of_what_the_ranks_see() -> None:
    keys = set()
    for configuration in ({"a": "1"}, {"a": "2"}, {"a": "1", "b": "1"}):
        for world_size in (1, 2):
            start = make(world_size)
            start.update([report(rank, **configuration) for rank in range(world_size)])
            keys.add(start.known_hasher.root_key({}))
    assert len(keys) == 3


def test_ranks_that_disagree_end_it(caplog: pytest.LogCaptureFixture) -> None:
    start = make(2)
    assert start.update([report(0, a="1", b="1"), report(1, a="1", b="2")])
    assert start.hasher is None
    assert not start.is_awaited()
    (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "they differ in b" in line.getMessage()


def test_the_wait_is_bounded_and_a_late_report_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    start = make(2, clock)
    clock.now += 1000.0  # nobody has asked yet
    start.update([report(0)])
    assert start.is_awaited()
    clock.now += 9.9
    assert start.is_awaited()
    clock.now += 0.2
    assert not any(start.is_awaited() for _ in range(3))
    (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "ranks [1] have not reported within 10 s" in line.getMessage()
    start.update([report(1)])
    assert start.hasher is not None


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_vllm_asks_again_until_the_ranks_have_reported(model: Path, role: str) -> None:
    engine = ShadowEngine(model, Shape(role=role, world_size=2), 0, Faults(slow=0.0), started=False)
    tokens = random.Random(0).choices(range(VOCABULARY), k=100)
    request = engine.add(tokens, 2)
    for _ in range(5):
        engine.step()
    assert all(plan.idle for plan in engine.plans)
    engine.report_start(1)
    engine.step()
    assert engine.plans[-1].idle
    engine.report_start(0)
    engine.run_until_idle()
    engine.check_answer(request)
    engine.check_whole()
    assert (engine.adapter.tally.totals.total("store_jobs") > 0) == (role != "kv_consumer")


def test_engines_that_make_each_step_together_wait_for_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine's wait would delay the running requests of the others."""
    monkeypatch.setattr(ModelConfig, "is_moe", True)

    def of_two(*args: Any, **kwargs: Any) -> VllmConfig:
        config = engine_config(*args, **kwargs)
        config.parallel_config.data_parallel_size = 2
        return config

    monkeypatch.setattr(f"{build_scheduler.__module__}.engine_config", of_two)
    engine = ShadowEngine(model, Shape(), 0, Faults(slow=0.0))
    request = engine.add(prompt(1, 100), 2)
    engine.run_until_idle()
    engine.check_answer(request)
    assert not any(plan.idle for plan in engine.plans)
    engine.adapter._wait.is_idle = True
    engine.adapter._find(engine.requests[request], 0)
    assert not engine.adapter._wait.is_idle
    assert engine.connector._guard is not None
    assert not engine.connector._guard.add_updates(None, is_idle=True).idle


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_drafter_may_still_write_blocks_of_a_request_that_has_ended(
    model: Path, lookahead: int
) -> None:
    """vLLM's model runner V2 tells of a step's tokens before its drafter has run."""
    in_use = ShadowEngine(model, Shape(lookahead=lookahead), 0).adapter.in_use
    in_use.freed([[1, 2]])
    assert in_use.includes_any({2}) == (lookahead > 0)
    in_use.next_step()
    assert not in_use.includes_any({2})


# -- what a step costs -----------------------------------------------------------------------------


MAX_FRAMES = 13
"""Python frames of the product in vLLM's calls per step. It was 45, and 4 more per request."""


def engine_of(model: Path, num_requests: int, shape: Shape) -> ShadowEngine:
    """Its requests all decode, in the middle of a block."""
    engine = ShadowEngine(model, shape, 0)
    for number in range(num_requests):
        name = engine.add([number] * (BLOCK_SIZE + 1), 6 * BLOCK_SIZE)
        engine.requests[name].sampling_params.stop_token_ids.clear()
    for _ in range(BLOCK_SIZE // 2 + 2 * shape.depth):
        engine.step()
    assert len(engine.scheduler.running) == num_requests
    return engine


def frames_of_a_step(engine: ShadowEngine) -> Counter[str]:
    """Of the product, in calls by vLLM's scheduler, in a step that plans nothing."""
    frames: Counter[str] = Counter()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            outputs: list[Any] = []
            frames.update(product_frames(lambda: outputs.append(call(*args))))
            return outputs[0]

        return count

    scheduler, now = engine.scheduler, engine.adapter.clock()
    engine.adapter.clock = repeat(now).__next__  # no frame, as the real one
    engine.step()  # no further metrics are due
    calls = {name: getattr(scheduler, name) for name in ("schedule", "update_from_output")}
    for name, call in calls.items():
        setattr(scheduler, name, counted(call))
    engine.step()
    for name, call in calls.items():
        setattr(scheduler, name, call)
    assert engine.plans[-1] == StepPlan()
    return frames


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [("full",), ("full", "w32")])
def test_a_quiet_step_takes_few_frames(model: Path, groups: tuple[str, ...], depth: int) -> None:
    engine = engine_of(model, 3, Shape(num_blocks=200, groups=groups, depth=depth))
    frames = frames_of_a_step(engine)
    assert frames.total() <= MAX_FRAMES, frames


def test_requests_add_no_frames(model: Path) -> None:
    shape = Shape(num_blocks=200)
    few, many = (frames_of_a_step(engine_of(model, count, shape)) for count in (1, 6))
    assert few == many


# -- what a step computes --------------------------------------------------------------------------


def works(engine: ShadowEngine) -> list[PrefillWork | None]:
    return [plan.prefill for plan in engine.plans]


@pytest.mark.parametrize("depth", [1, 2])
def test_each_step_of_a_prompt_says_what_it_computes(model: Path, depth: int) -> None:
    engine = ShadowEngine(model, Shape(depth=depth), 1)
    engine.add(prompt(1, 110), 8)
    engine.run_until_idle()
    found = works(engine)
    assert found[:2] == [PrefillWork(64, 0), PrefillWork(46, 64)]
    assert not any(found[2:])  # decode steps, and idle ones


def test_several_prompts_count_as_one_that_reads_as_much(model: Path) -> None:
    engine = ShadowEngine(model, Shape(max_batched_tokens=256), 1)
    engine.add(prompt(1, 40), 20)
    engine.step()
    engine.add(prompt(2, 50), 1)
    engine.add(prompt(3, 70), 1)
    engine.step()
    last = works(engine)[-1]
    assert last is not None
    assert last.num_tokens == 120
    assert last.context_tokens == 0  # they read less than one prompt of 120 tokens does
    engine.run_until_idle()


@pytest.mark.parametrize("is_async", [True, False])
def test_a_step_in_which_another_connector_loads_is_not_timed(model: Path, is_async: bool) -> None:
    """Such a load adds to the step's time: vLLM starts all loads before the forward pass then."""
    engine = ShadowEngine(model, Shape(beside=1), 0)
    offer = Offer(BLOCK_SIZE, is_async, Arrival.RIGHT)
    engine.add(prompt(1, 126), 1, offer=offer)
    engine.run_until_idle()
    assert works(engine)[0] is None
    assert any(works(engine)), "and the next one is"
