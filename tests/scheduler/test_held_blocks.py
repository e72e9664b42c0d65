"""Blocks that stores hold cost vLLM neither preemptions nor steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_connector.plans import PartRun, StoreJob
from lmcache_connector.scheduler.held_blocks import MAX_SECONDS, MAX_STEPS, HeldBlocks
from tests.support.clock import Clock
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE, VOCABULARY
from tests.support.doubles.shadow_worker import Faults

SCARCE = Shape(num_blocks=40, groups=("full", "w32"), tier_chunks=1000, prefix_caching=False)
SEEDS = 3
SCARCE_FULL = Shape(num_blocks=24, tier_chunks=1000, prefix_caching=False)


def prompts(seed: int, count: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        chance.choices(range(VOCABULARY), k=chance.randrange(BLOCK_SIZE, 8 * BLOCK_SIZE))
        for _ in range(count)
    ]


def serve(model: Path, shape: Shape, seed: int, faults: Faults) -> tuple[int, int]:
    """Preemptions, and steps until all are answered."""
    engine = ShadowEngine(model, shape, seed, faults)
    for prompt in prompts(seed, 12):
        engine.add(prompt, 4 * BLOCK_SIZE)
    while engine.live:
        engine.step()
        assert len(engine.plans) < 4000, "stuck"
    num_steps = len(engine.plans)
    faults.stuck = False
    engine.run_until_idle()
    engine.check_whole()
    return engine.num_preemptions, num_steps


@pytest.mark.parametrize("shape", [SCARCE, SCARCE_FULL], ids=["windows", "full"])
@pytest.mark.parametrize("faults", [{"stuck": True}, {"slow": 0.9}], ids=str)
def test_slow_stores_cost_no_preemptions_and_hardly_a_step(
    model: Path, shape: Shape, faults: dict[str, float]
) -> None:
    """Against an engine that stores nothing. Neither loads anything. A lane that is stuck costs one
    wait, until a store is overdue."""
    wait = SEEDS * MAX_STEPS if "stuck" in faults else 0
    runs = {
        role: [
            serve(model, replace(shape, role=role), seed, Faults(**faults))  # type: ignore[arg-type]
            for seed in range(SEEDS)
        ]
        for role in ("kv_consumer", "kv_producer")
    }
    preemptions = {role: sum(p for p, _ in each) for role, each in runs.items()}
    steps = {role: sum(s for _, s in each) for role, each in runs.items()}
    assert preemptions["kv_consumer"] > 0, "blocks are not scarce"
    assert preemptions["kv_producer"] <= preemptions["kv_consumer"]
    assert steps["kv_producer"] <= 1.02 * steps["kv_consumer"] + wait


class Held:
    """What stores of windows hold of a pool of 40 blocks, two blocks each, outside of any step."""

    def __init__(self, model: Path) -> None:
        self.clock = Clock(0.0)
        self.engine = ShadowEngine(model, SCARCE, 0)
        adapter = self.engine.adapter
        self.blocks = HeldBlocks(adapter.settings, adapter.witness, self.clock)
        self.pool = self.engine.scheduler.kv_cache_manager.block_pool

    def pin(self, job_id: int, block_ids: Sequence[int]) -> None:
        run = PartRun(1, (b"k" * 32,), (0,), (tuple(block_ids),))
        self.blocks.pin_passing(StoreJob(job_id, "r", (run,)))

    @property
    def num_free(self) -> int:
        return int(self.pool.get_num_free_blocks())


def test_nothing_is_pinned_behind_an_overdue_store_while_a_request_waits(model: Path) -> None:
    held = Held(model)
    held.pin(1, [3, 4])
    held.clock.now = MAX_SECONDS * 1.01
    held.blocks.next_step(is_crowded=False)
    held.pin(2, [5, 6])
    assert len(held.blocks._pins) == 1, "nobody waits"
    held.blocks.next_step(is_crowded=True)
    held.pin(3, [7, 8])
    assert len(held.blocks._pins) == 0
    held.blocks.ended(1)
    held.pin(4, [7, 8])
    assert len(held.blocks._pins) == 1


def test_pins_never_hold_more_than_half_of_all_blocks(model: Path) -> None:
    held = Held(model)
    for job_id in range(1, 14):
        held.pin(job_id, [2 * job_id, 2 * job_id + 1])
    assert len(held.blocks._pins) == 10
    held.blocks.ended(1)
    held.pin(14, [30, 31])
    assert len(held.blocks._pins) == 10


def test_the_newest_pins_give_way_to_what_vllm_needs(model: Path) -> None:
    held = Held(model)
    free = held.num_free
    for job_id in range(1, 5):
        held.pin(job_id, [2 * job_id, 2 * job_id + 1])
    held.blocks.unpin_for(free - 8)
    assert len(held.blocks._pins) == 4
    held.blocks.unpin_for(free - 5)
    assert len(held.blocks._pins) == 2
    held.blocks.ended(4)
    assert held.num_free == free - 4, "the newest had gone"
    held.blocks.ended(1)
    assert held.num_free == free - 2


# -- blocks of requests that have ended ------------------------------------------------------------


LENGTH = 8 * BLOCK_SIZE + 2


def long_prompts(count: int) -> list[list[int]]:
    chance = random.Random(count)
    return [chance.choices(range(VOCABULARY), k=LENGTH) for _ in range(count)]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_most_answers_are_stored_where_blocks_are_scarce(model: Path, prefix_caching: bool) -> None:
    """Not all: some blocks are needed by requests that run."""
    shape = Shape(num_blocks=24, prefix_caching=prefix_caching, tier_chunks=1000)
    engine = ShadowEngine(model, shape, 0, Faults(slow=0.5))
    for prompt in long_prompts(30):
        engine.add(prompt, 2 * BLOCK_SIZE)
    engine.run_until_idle()
    engine.check_whole()
    stored = {key for rank in engine.ranks for key in rank.tier}
    possible = sum((r.num_tokens - 1) // engine.shape.chunk_size for r in engine.requests.values())
    assert len(stored) > 0.95 * possible


def test_a_reset_while_a_request_runs_finds_no_pins(model: Path) -> None:
    faults = Faults(stuck=True)
    engine = ShadowEngine(model, Shape(num_blocks=100, prefix_caching=False), 0, faults)
    for prompt in long_prompts(4):
        engine.add(prompt, 2)
    engine.add(long_prompts(5)[4], 40)
    while len(engine.live) > 1:
        engine.step()
    assert engine.adapter.held._pins
    assert engine.adapter.has_unattended_jobs
    assert engine.reset(preempt=True)
    faults.stuck = False
    engine.run_until_idle()
    engine.check_whole()


def test_no_pin_outlasts_the_last_request(model: Path) -> None:
    """Whoever steps the engine may reset it then."""
    faults = Faults(stuck=True)
    engine = ShadowEngine(model, Shape(num_blocks=100, prefix_caching=False), 0, faults)
    engine.add(long_prompts(1)[0], 2)
    while engine.live:
        engine.step()
    assert engine.adapter.has_unattended_jobs
    assert not engine.adapter.held._pins
    faults.stuck = False
    engine.run_until_idle()
    engine.check_whole()
