"""Loads that the forward pass of their own step reads, and what makes room for others meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.plans import JobResult, LoadJob, Outcome, StepPlan
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.worker.adapter import WorkerAdapter
from lmcache_connector.worker.build import loads_in_step
from lmcache_connector.worker.lmcache_start import RankSettings
from tests.support.integrity import empty
from tests.support.jobs import at_once, load_job, one_part, store_job, tier_config
from tests.support.redis.servers import Server
from tests.support.vllm_configs import vllm_config
from tests.support.workers import FixedWeights

GEOMETRY = ChunkGeometry(64, 0, (2048,), (0, 1), 2, "uint8")
CAPACITY = 8
NUM_BLOCKS = 40
KEYS = [bytes([i]) * 32 for i in range(160)]


@dataclass
class Rank:
    """A rank whose CPU tier holds ``capacity`` chunks, each a block, and the index of a scheduler
    side. ``num_acked``: plans that were made with news of leaving chunks."""

    capacity: int = CAPACITY
    redis: RedisTier | None = None
    num_acked: int = 0
    weights: FixedWeights = field(default_factory=FixedWeights)
    results: list[JobResult] = field(default_factory=list)
    received: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.cache = torch.zeros(NUM_BLOCKS, 2, 64, 2048, dtype=torch.uint8)
        for block in range(NUM_BLOCKS):
            self.cache[block] = block
        rank_gib = self.capacity * GEOMETRY.chunk_bytes / 2**30
        settings = RankSettings(
            tier_config(rank_gib),
            announces=True,
            parts=one_part(GEOMETRY, 64),
        )
        caches = {"layers.0": self.cache}
        self.worker = WorkerAdapter(settings, caches, self.redis, weights=self.weights)
        self.index = ChunkIndex(1)
        self.step(StepPlan())

    def step(self, plan: StepPlan) -> None:
        plan = replace(plan, acked_leaving=self.index.take_acked())
        self.num_acked += bool(plan.acked_leaving)
        self.worker.handle_preemptions(plan)
        self.worker.start_forward(plan)
        self.worker.load_in_step(plan)
        self.worker.start_loads(plan)
        self.worker.end_forward(plan)
        self.collect()

    def collect(self) -> None:
        output = self.worker.finish_step()
        self.received |= output.finished_recving
        for report in output.reports:
            self.results += report.results
            self.index.apply(0, report.events, report.num_leaving)

    def store(self, job_id: int, first: int, count: int) -> Outcome:
        """Chunks from blocks of the same number, with as many steps as it takes."""
        blocks = tuple(range(first, first + count))
        keys = tuple(KEYS[first : first + count])
        self.step(StepPlan(stores=(store_job(job_id, "r", keys, (blocks,)),)))
        until = time.monotonic() + 20.0
        while not (found := [r for r in self.results if r.job_id == job_id]):
            assert time.monotonic() < until
            self.step(StepPlan(idle=True))
        return found[0].outcome

    def value(self, block: int) -> int:
        (value,) = self.cache[block].unique().tolist()
        return int(value)


def in_step(job_id: int, keys: list[bytes], first_block: int) -> LoadJob:
    blocks = tuple(range(first_block, first_block + len(keys)))
    return replace(load_job(job_id, "reader", tuple(keys), (blocks,)), in_step=True)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.worker.shutdown()


def test_the_pass_finds_what_is_loaded_and_vllm_waits_for_nothing(rank: Rank) -> None:
    assert rank.store(1, 0, 3) is Outcome.DONE
    assert rank.index.num_firm(KEYS) == 3
    plan = StepPlan(loads=(in_step(2, KEYS[:3], 30),))
    rank.worker.load_in_step(plan)
    assert [rank.value(block) for block in range(30, 33)] == [0, 1, 2]
    rank.collect()
    (result,) = [each for each in rank.results if each.job_id == 2]
    assert (result.outcome, result.num_chunks) == (Outcome.DONE, 3)
    assert result.num_bytes == 3 * GEOMETRY.chunk_bytes
    assert result.seconds > 0
    assert rank.received == set()
    rank.step(StepPlan(idle=True))
    assert len([each for each in rank.results if each.job_id == 2]) == 1


def test_a_chunk_that_is_missing_ends_the_step_before_anything_is_copied(rank: Rank) -> None:
    assert rank.store(1, 0, 2) is Outcome.DONE
    with pytest.raises(RuntimeError, match="not in memory any more"):
        rank.worker.load_in_step(StepPlan(loads=(in_step(2, KEYS[1:3], 30),)))
    assert [rank.value(30), rank.value(31)] == [30, 31]
    engine = rank.worker._tiers.engine
    empty(engine)
    rank.step(StepPlan(idle=True))
    rank.step(StepPlan(idle=True))
    assert engine.cpu.used_bytes == 0, "nothing refers to them any more"


def test_weights_that_changed_since_the_plan_end_the_step(rank: Rank) -> None:
    assert rank.store(1, 0, 1) is Outcome.DONE
    acked = (rank.weights.changes.number,)
    rank.weights.changes.add()
    with pytest.raises(RuntimeError, match="weights"):
        rank.worker.load_in_step(StepPlan(loads=(in_step(2, KEYS[:1], 30),), acked_weights=acked))
    assert rank.value(30) == 30


@pytest.mark.parametrize(("capacity", "num_chunks"), [(64, 32), (8, 4), (8, 8)])
def test_what_needs_much_room_waits_for_few_plans(capacity: int, num_chunks: int) -> None:
    """Not for one per chunk: steps may be long, and a load from Redis waits as stores do."""
    rank = Rank(capacity=capacity)
    try:
        blocks = tuple(range(num_chunks))
        for number in range(3):
            rank.num_acked = 0
            keys = tuple(KEYS[number * num_chunks : (number + 1) * num_chunks])
            rank.step(StepPlan(stores=(store_job(1 + number, "r", keys, (blocks,)),)))
            until = time.monotonic() + 20.0
            while len(rank.results) <= number:
                assert time.monotonic() < until
                rank.step(StepPlan(idle=True))
            assert rank.results[number].num_chunks == num_chunks
            assert rank.num_acked <= 2 + num_chunks // 16
        assert rank.worker._tiers.engine.cpu.num_chunks <= capacity
        assert rank.num_acked > 0
    finally:
        rank.worker.shutdown()


def test_between_two_steps_no_store_waits_for_a_plan(rank: Rank) -> None:
    """No plan would come: a reset is waiting for the stores."""
    for number in range(3):
        rank.store(1 + number, 3 * number, 3)
    plan = StepPlan(stores=(store_job(9, "r", tuple(KEYS[10:16]), (tuple(range(10, 16)),)),))
    rank.worker.start_forward(plan)
    rank.worker.end_forward(plan)
    started = time.monotonic()
    rank.worker.finish_stores()
    assert time.monotonic() - started < 0.9
    rank.collect()
    assert [each.job_id for each in rank.results].count(9) == 1
    assert rank.store(10, 10, 6) is Outcome.DONE


@pytest.mark.parametrize("is_made", [True, False])
def test_a_load_of_a_step_that_failed_is_reported_once(rank: Rank, is_made: bool) -> None:
    assert rank.store(1, 0, 1) is Outcome.DONE
    plan = StepPlan(loads=(in_step(2, KEYS[:1], 30),))
    rank.worker.start_forward(plan)
    if is_made:
        rank.worker.load_in_step(plan)
    rank.worker.step_failed("start_loads", plan)
    for _ in range(3):
        rank.step(StepPlan(idle=True))
    (outcome,) = [each.outcome for each in rank.results if each.job_id == 2]
    assert outcome is (Outcome.DONE if is_made else Outcome.CANCELLED)


@pytest.mark.parametrize(
    ("executor", "setting", "expected"),
    [
        ("uni", True, True),
        ("mp", True, True),
        ("external_launcher", True, True),
        ("mp", False, False),
        ("ray", True, False),
        (object, True, False),  # an executor of somebody's own
    ],
)
def test_loads_are_made_inside_steps_where_that_is_proven_and_steps_stay_in_order(
    model: Path, executor: Any, setting: bool, expected: bool
) -> None:
    config = vllm_config(model)
    config.parallel_config.distributed_executor_backend = executor
    assert loads_in_step(ConnectorConfig(loads_in_step=setting), config) is expected


def test_a_load_keeps_time_to_read_what_has_found_room(valkey: Server) -> None:
    """A full tier evicts only what the last plan knew as leaving, and no further plan comes."""
    tier = RedisTier(RedisTierConfig(url=valkey.url), PartGeometries((GEOMETRY,)))
    rank = Rank(redis=tier)
    try:
        assert rank.store(1, 20, 4) is Outcome.DONE
        assert tier.flush(10.0)
        engine = rank.worker._tiers.engine
        for key in KEYS[20:24]:
            engine.cpu.forget(key)
        assert rank.store(2, 0, CAPACITY - 2) is Outcome.DONE
        assert tier.flush(10.0)
        engine.cpu.leaving.await_plans(may_come=True)
        engine._piece_bytes = 4 * GEOMETRY.chunk_bytes  # one read of them all
        job = load_job(3, "r", tuple(KEYS[20:24]), ((0, 1, 2, 3),), may_fetch=True)
        assert sum(each.num_chunks for each in engine.load(job, at_once(job))) == 2
    finally:
        rank.worker.shutdown()
