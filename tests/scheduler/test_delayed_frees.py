"""A store is not lost because its request ends before it has read the request's blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.doubles.shadow_worker import VOCABULARY, Faults

LENGTH = 8 * BLOCK_SIZE + 2


def prompts(count: int) -> list[list[int]]:
    chance = random.Random(count)
    return [chance.choices(range(VOCABULARY), k=LENGTH) for _ in range(count)]


def serve_beside_stuck_stores(model: Path, shape: Shape, prompts: Sequence[list[int]]) -> None:
    """All are answered, and right, though no store ends until they are."""
    faults = Faults(stuck=True)
    engine = ShadowEngine(model, shape, 0, faults)
    ids = [engine.add(prompt, 3) for prompt in prompts]
    for _ in range(600):
        engine.step()
    assert not engine.live
    faults.stuck = False
    engine.run_until_idle()
    engine.check_whole()
    for request_id in ids:
        engine.check_answer(request_id)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_many_prompts_in_a_row_are_all_stored(
    model: Path, depth: int, prefix_caching: bool
) -> None:
    """Without prefix caching vLLM hands out first what was given back last."""
    shape = Shape(num_blocks=100, depth=depth, prefix_caching=prefix_caching, tier_chunks=1000)
    engine = ShadowEngine(model, shape, 0, Faults(slow=0.5))
    for prompt in prompts(30):
        engine.add(prompt, 1)
    engine.run_until_idle()
    engine.check_whole()
    assert engine.ranks[0].num_stored_chunks == 30 * 4


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_most_answers_are_stored_where_blocks_are_scarce(model: Path, prefix_caching: bool) -> None:
    """Some blocks are needed by requests that run: none is preempted for a store."""
    shape = Shape(num_blocks=24, prefix_caching=prefix_caching, tier_chunks=1000)
    engine = ShadowEngine(model, shape, 0, Faults(slow=0.5))
    for prompt in prompts(30):
        engine.add(prompt, 2 * BLOCK_SIZE)
    engine.run_until_idle()
    engine.check_whole()
    stored = {key for rank in engine.ranks for key in rank.tier}
    possible = sum((r.num_tokens - 1) // engine.shape.chunk_size for r in engine.requests.values())
    assert len(stored) > 0.95 * possible


def test_nothing_waits_for_ever_for_a_store_that_is_stuck(model: Path) -> None:
    serve_beside_stuck_stores(model, Shape(num_blocks=24, prefix_caching=False), prompts(6))


def test_nothing_is_kept_between_two_calls(model: Path) -> None:
    """Or vLLM could not be reset while another request runs."""
    faults = Faults(stuck=True)
    engine = ShadowEngine(model, Shape(num_blocks=100, prefix_caching=False), 0, faults)
    for prompt in prompts(4):
        engine.add(prompt, 2)
    engine.add(prompts(5)[4], 40)
    while len(engine.live) > 1:
        engine.step()
        assert engine.adapter.held.num_delayed == 0
    assert engine.adapter.has_unattended_jobs
    assert engine.reset(preempt=True)
    faults.stuck = False
    engine.run_until_idle()
    engine.check_whole()
