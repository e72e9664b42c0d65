"""What a real worker side fetches ahead, over a real Valkey: what comes, and what gives way."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch

from lmcache_connector.plans import Outcome, PartRun, PrefetchJob, StepPlan
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
from tests.support.jobs import load_job
from tests.support.redis.slow_proxy import SlowLink
from tests.support.waits import wait_until
from tests.support.workers import SteppedWorker
from tests.worker.test_adapter import (
    GEOMETRY,
    KEYS,
    LONG,
    connected,
    link,
    load,
    port,
    reader,
    same,
    stored,
    written,
)

__all__ = ["link", "port", "reader", "written"]


def prefetch(job_id: int, chunks: range) -> PrefetchJob:
    keys = tuple(KEYS[i] for i in chunks)
    return PrefetchJob(job_id, f"r{job_id}", (PartRun(0, keys, tuple(chunks), ()),), LONG)


def load_from_memory(job_id: int, chunks: range) -> StepPlan:
    """Into the first blocks."""
    keys = tuple(KEYS[i] for i in chunks)
    return StepPlan(loads=(load_job(job_id, "r", keys, (tuple(range(2 * len(keys))),)),))


def num_unused(engine: LMCacheEngineAdapter) -> int:
    """Chunks that were fetched ahead, that no job has used, and that somebody still waits for."""
    with engine._cpu.cpu_lock:
        engine._ledger.settle()
    chunks = engine._ledger._chunks.values()
    return sum(not (chunk.is_claimed or chunk.is_expired) for chunk in chunks)


def assert_nothing_is_held(instance: SteppedWorker) -> None:
    """Memory holds what is in the tier, and nobody refers to it."""
    engine = instance.worker._engine
    assert all(memory.get_ref_count() == 1 for memory in engine._cpu.hot_cache.values())
    assert engine.used_bytes == sum(
        memory.meta.phy_size for memory in engine._cpu.hot_cache.values()
    )


def test_a_request_that_waited_loads_from_memory(
    reader: SteppedWorker, written: list[torch.Tensor], link: SlowLink
) -> None:
    connected(reader)
    reader.redis_bytes = 0
    reader.run(StepPlan(prefetches=(prefetch(1, range(10)), prefetch(2, range(5, 20)))))
    assert reader.wait_for(1).outcome is reader.wait_for(2).outcome is Outcome.DONE
    assert reader.redis_bytes == 20 * GEOMETRY.chunk_bytes
    assert_nothing_is_held(reader)
    link.set(stalled=True)
    reader.run(load_from_memory(3, range(20)))
    assert reader.wait_for(3).outcome is Outcome.DONE
    assert same(reader.blocks(range(40)), stored(written, range(20)))
    assert num_unused(reader.worker._engine) == 0


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "at its deadline"])
def test_a_prefetch_ends_while_redis_is_silent(
    reader: SteppedWorker, written: list[torch.Tensor], link: SlowLink, cancelled: bool
) -> None:
    connected(reader)
    link.set(stalled=True)
    before = reader.worker._engine.num_chunks
    jobs: tuple[PrefetchJob, ...] = (prefetch(1, range(10)), prefetch(2, range(10, 20)))
    if not cancelled:
        jobs = tuple(PrefetchJob(j.job_id, j.request_id, j.runs, 0.2) for j in jobs)
    reader.run(StepPlan(prefetches=jobs))
    if cancelled:
        reader.run(StepPlan(cancelled_loads=(1, 2), unwanted=KEYS[:20]))
    expected = Outcome.CANCELLED if cancelled else Outcome.DEADLINE
    for job in jobs:
        assert reader.wait_for(job.job_id).outcome is expected
    assert reader.results[1].has_fetch_failed == (not cancelled)
    assert reader.worker._engine.num_chunks == before
    assert_nothing_is_held(reader)
    link.set()

    numbers = count(100)

    def loads() -> bool:  # the circuit may have to close first
        number = next(numbers)
        reader.run(StepPlan(loads=(load(number, range(20), 0),)))
        return reader.outcome(number) is Outcome.DONE

    wait_until(loads, "nothing loads after a prefetch that failed")
    assert same(reader.blocks(range(40)), stored(written, range(20)))


def test_what_a_prefetch_has_waited_is_not_taken_for_a_redis_that_fails(
    reader: SteppedWorker, link: SlowLink
) -> None:
    """It would be left alone from then on, with all the hits that it holds."""
    connected(reader)
    link.set(bytes_per_second=10 * GEOMETRY.chunk_bytes)  # a second for each
    jobs = [
        replace(prefetch(i + 1, range(10 * i, 10 * i + 10)), deadline_seconds=1.6) for i in (0, 1)
    ]
    reader.run(StepPlan(prefetches=tuple(jobs)))
    for job in jobs:
        assert reader.wait_for(job.job_id).outcome is Outcome.DONE
        assert not reader.results[job.job_id].has_fetch_failed
