"""What a plan says of a step's prefill, under vLLM's real scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_connector.plans import ForwardTime, PrefillWork, RankReport
from tests.support.doubles.foreign_connector import Arrival, Offer
from tests.support.doubles.lives import prompt
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE


def works(engine: ShadowEngine) -> list[PrefillWork | None]:
    return [plan.prefill for plan in engine.plans]


@pytest.mark.parametrize("depth", [1, 2])
def test_each_step_of_a_prompt_says_what_it_computes(model: Path, depth: int) -> None:
    engine = ShadowEngine(model, Shape(depth=depth), 1)
    engine.add(prompt(1, 110), 8)
    engine.run_until_idle()
    found = works(engine)
    assert found[:2] == [PrefillWork(64, 0, 0), PrefillWork(46, 64, 0)]
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
    assert (last.num_tokens, last.running_requests) == (120, 1)
    assert last.context_tokens == 0  # they read less than one prompt of 120 tokens does
    engine.run_until_idle()


@pytest.mark.parametrize("is_async", [True, False])
def test_a_step_in_which_another_connector_loads_is_not_timed(model: Path, is_async: bool) -> None:
    """vLLM starts all loads before the forward pass then, and ours ended the measurement there."""
    engine = ShadowEngine(model, Shape(beside=1), 0)
    offer = Offer(BLOCK_SIZE, is_async, Arrival.RIGHT)
    engine.add(prompt(1, 126), 1, offer=offer)
    engine.run_until_idle()
    assert works(engine)[0] is None
    assert any(works(engine)), "and the next one is"


def test_forward_times_teach_what_recompute_costs(model: Path) -> None:
    engine = ShadowEngine(model, Shape(), 1)
    policy = engine.adapter.policy
    assert policy.model.compute_seconds(0, 1000) is None
    work = PrefillWork(1000, 0, 0)
    engine.adapter.update_from_reports([RankReport(0, (), (), (ForwardTime(work, 0.5),))])
    assert policy.model.compute_seconds(0, 1000) == pytest.approx(0.5, rel=0.01)
