"""Whatever a worker side raises, in whichever call: the engine goes on, and no KV is wrong.

The connector, the worker side, LMCache, the Redis tier and Valkey are real; only vLLM is missing.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lmcache_connector.connector import LMCacheTieredConnector, PlanMetadata
from lmcache_connector.errors import FailureLog
from lmcache_connector.plans import (
    JobResult,
    LoadJob,
    Outcome,
    StepPlan,
    StoreJob,
    TransferUpdate,
)
from lmcache_connector.worker.adapter import _NO_UPDATES
from lmcache_connector.worker.job_queue import QueuedJob
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
from tests.support.jobs import load_job, store_job
from tests.support.planted import PlantedError, Planter
from tests.support.redis.servers import running_valkey
from tests.support.workers import SteppedWorker
from tests.worker.test_adapter import KEYS, make_instance

CALLS = ("handle_preemptions", "start_forward", "start_loads", "end_forward", "finish_step")
LOADED = range(16, 24)  # blocks


class Rank:
    """Steps the connector of one rank as vLLM does, and notes what it tells."""

    def __init__(self, instance: SteppedWorker) -> None:
        self.instance = instance
        self.connector = object.__new__(LMCacheTieredConnector)
        self.connector._scheduler, self.connector._worker = None, instance.worker
        self.connector._step = self.connector._step_output = None
        self.connector._failures = FailureLog()
        self.results: dict[int, JobResult] = {}
        self.num_told: Counter[str] = Counter()  # requests whose loads have ended
        self.num_freed: Counter[str] = Counter()  # requests whose blocks no store reads any more
        self.admitted: set[bytes] = set()
        self._ids = itertools.count(1)

    def step(self, plan: StepPlan | None) -> None:
        metadata = PlanMetadata(plan)
        self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        sent, loaded = self.connector.get_finished(set())
        self.num_freed.update(sent or ())
        self.num_told.update(loaded or ())
        meta = self.connector.build_connector_worker_meta()
        for report in meta.reports if meta is not None else ():
            for result in report.results:
                assert result.job_id not in self.results, "reported twice"
                self.results[result.job_id] = result
        self.connector.get_kv_connector_stats()
        self.connector.clear_connector_metadata()

    def fail(self, plan: StepPlan | None, way: str) -> None:
        """The model raises. vLLM's first model runner makes the later calls of the step all the
        same ("told"), its second does not. Or the preparation of the step's inputs raises, or the
        drafter, which runs within a step's end."""
        metadata = PlanMetadata(plan)
        self.connector._ends_late = way == "a drafter"
        self.connector.handle_preemptions(metadata)
        if way == "inputs":
            return
        self.connector.bind_connector_metadata(metadata)
        if way == "a drafter":
            self.connector.start_load_kv(None)
            self.connector.get_finished(set())
            return
        with suppress(PlantedError):
            try:
                raise PlantedError
            finally:
                if way == "told":
                    self.connector.start_load_kv(None)
                    self.connector.wait_for_save()
                    self.connector.get_finished(set())
                    self.connector.clear_connector_metadata()

    def store(self) -> StoreJob:
        job_id = next(self._ids)
        return store_job(job_id, f"r{job_id}", KEYS[:4], (tuple(range(8)),))

    def load(self) -> LoadJob:
        job_id = next(self._ids)
        return load_job(job_id, f"r{job_id}", KEYS[:4], (tuple(LOADED),), deadline_seconds=20.0)

    def finish(self, *jobs: LoadJob | StoreJob) -> None:
        """Step until all jobs are reported; each load's request must have been told of once."""
        until = time.monotonic() + 20
        while not all(job.job_id in self.results for job in jobs):
            assert time.monotonic() < until, "a job does not end"
            self.step(StepPlan(idle=True))
        self.step(None)
        loads = [job for job in jobs if isinstance(job, LoadJob)]
        assert [self.num_told[job.request_id] for job in loads] == [1] * len(loads)


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    with running_valkey() as valkey:
        rank = Rank(make_instance(valkey.port))
        yield rank
        rank.instance.worker.shutdown()


def check_hit(rank: Rank) -> None:
    """A load brings what was stored."""
    store, load = rank.store(), rank.load()
    rank.step(StepPlan(stores=(store,)))
    rank.finish(store)
    forget(rank)
    rank.step(StepPlan(loads=(load,)))
    rank.finish(load)
    assert rank.results[load.job_id].outcome is Outcome.DONE
    same = map(torch.equal, rank.instance.blocks(LOADED), rank.instance.blocks(range(8)))
    assert all(same)


def forget(rank: Rank) -> list[torch.Tensor]:
    """Zero the blocks that loads fill, and return them."""
    for layer in rank.instance.cache.values():
        layer[list(LOADED)] = 0
    return rank.instance.blocks(LOADED)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_raises_costs_its_jobs_alone(
    rank: Rank, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every job is reported once; a load that was not whole is a failed one, and nothing writes its
    blocks afterwards. The request of a KV transfer gives back its blocks."""
    check_hit(rank)
    num_failed = 0
    for depth in range(1, 300):
        early, store, load, first = rank.store(), rank.store(), rank.load(), rank.load()
        rank.step(StepPlan(loads=(first,), stores=(early,)))
        forget(rank)
        with monkeypatch.context() as patch:
            patch.setattr(rank.instance.worker, call, getattr(rank.instance.worker, call))
            planter = Planter(rank.instance.worker, call, 0, depth)
            late = rank.store()
            held, stores = store.request_id, (store, late)
            sent = TransferUpdate(held, store.keys, frozenset(s.job_id for s in stores), held)
            rank.step(StepPlan(loads=(load,), stores=stores, transfers=(sent,)))
            rank.finish(early, load, first, *stores)
        assert rank.num_freed[held] == 1
        after = rank.instance.blocks(LOADED)
        if (outcome := rank.results[load.job_id].outcome) is Outcome.DONE:
            assert all(map(torch.equal, after, rank.instance.blocks(range(8))))
        else:
            assert outcome is Outcome.CANCELLED
            num_failed += planter.has_raised
        check_hit(rank)
        if not planter.has_raised:
            break
    assert depth > 1
    assert not planter.has_raised, "some of its functions were not made to raise"
    rank.step(None)
    assert set(rank.num_freed.values()) == {1}
    assert num_failed or call in {"handle_preemptions", "end_forward", "finish_step"}


@pytest.mark.parametrize("call", CALLS[:2])
def test_a_load_inside_a_step_that_begins_badly_is_made_and_reported_once(
    rank: Rank, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has planned the forward pass with it."""
    check_hit(rank)
    forget(rank)
    load = replace(rank.load(), in_step=True)
    with monkeypatch.context() as patch:
        patch.setattr(rank.instance.worker, call, lambda plan: 1 / 0)
        rank.step(StepPlan(loads=(load,)))
    rank.step(StepPlan(idle=True))  # a second report would fail here
    assert rank.results[load.job_id].outcome is Outcome.DONE
    assert all(map(torch.equal, rank.instance.blocks(LOADED), rank.instance.blocks(range(8))))


@pytest.mark.parametrize("way", ["inputs", "told", "not told", "a drafter"])
@pytest.mark.parametrize("planned", [True, False], ids=["with a plan", "without"])
def test_after_a_step_that_raised_nothing_is_stored(way: str, planned: bool) -> None:
    """Its blocks were not computed, and vLLM takes them for computed if its user goes on."""
    with running_valkey() as valkey:
        rank = Rank(make_instance(valkey.port))
        try:
            raise ValueError  # which the engine's user is handling
        except ValueError:
            check_hit(rank)
            load, store, later = rank.load(), rank.store(), rank.store()
            loads = () if way == "a drafter" else (load,)  # one may have ended when a drafter runs
            plan = StepPlan(loads=loads, stores=(store,)) if planned else None
            rank.fail(plan, way)
            rank.step(StepPlan(stores=(later,)))
        rank.finish(*((*loads, store, later) if planned else (later,)))
        outcomes = {result.outcome for job, result in rank.results.items() if job >= load.job_id}
        assert outcomes == {Outcome.CANCELLED}
        again = rank.load()
        rank.step(StepPlan(loads=(again,)))
        rank.finish(again)
        assert rank.results[again.job_id].outcome is Outcome.DONE
        rank.connector.shutdown()


def test_a_recovery_that_is_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_valkey() as valkey:
        rank = Rank(make_instance(valkey.port))
        store = rank.store()
        rank.fail(StepPlan(stores=(store,)), "not told")
        interrupted = Mock(side_effect=KeyboardInterrupt)
        with monkeypatch.context() as patch:
            patch.setattr(rank.instance.worker, "step_failed", interrupted)
            with pytest.raises(KeyboardInterrupt):
                rank.step(None)
        rank.finish(store)
        assert rank.results[store.job_id].outcome is Outcome.CANCELLED
        rank.connector.shutdown()


@pytest.mark.parametrize(
    ("is_sent", "place"),
    [
        (True, "worker.adapter.StepOutput"),
        (True, "peers.transfers.Transfers.forget_finished"),
        (False, "worker.adapter.StepOutput"),
    ],
)
def test_what_was_interrupted_while_it_was_reported_is_reported_by_the_next_step(
    rank: Rank, is_sent: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store, and once that the blocks of a sent prompt are free."""
    store = rank.store()
    held = store.request_id
    sent = TransferUpdate(held, store.keys, frozenset((store.job_id,)), held)
    monkeypatch.setattr(rank.instance.worker, "finish_step", lambda: _NO_UPDATES)
    rank.step(StepPlan(stores=(store,), transfers=(sent,) if is_sent else ()))
    monkeypatch.undo()
    assert rank.instance.worker._jobs.cancel_all(20.0)
    interrupted = Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(f"lmcache_connector.{place}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank.instance.worker.finish_step()
    for _ in range(2):
        rank.step(None)
    assert store.job_id in rank.results
    assert rank.num_freed[held] == is_sent


def test_what_the_first_report_was_to_tell_is_told_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_valkey() as valkey:
        rank = Rank(make_instance(valkey.port))
        with monkeypatch.context() as patch:
            patch.setattr(rank.instance.worker._lora_loads, "take", lambda: 1 / 0)
            rank.step(None)
        told = []
        monkeypatch.setattr(rank.instance.worker, "_output", lambda report: told.append(report))
        rank.instance.worker.finish_step()
        (report,) = told
        assert report.start is not None
        assert report.weights is not None
        rank.instance.worker.shutdown()


def test_what_vllm_may_have_lost_is_told_again(rank: Rank) -> None:
    """As when a user who steps the engine interrupts it before vLLM's update from a step."""
    instance = rank.instance
    instance.run(StepPlan(idle=True))
    assert not any(made.start or made.weights for made in instance.run(StepPlan(idle=True)))
    (told,) = instance.run(StepPlan(idle=True, asks_again=True))
    assert told.start is not None
    assert told.weights is not None


def test_a_plan_that_starts_over_cancels_what_is_open(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that brings an empty load for a request that waits reports its end at once."""
    check_hit(rank)
    kept, engine = forget(rank), rank.instance.worker._tiers.engine
    load, empty = rank.load(), LoadJob(-1, "waits", (), 0.0, may_fetch=False, after_job=0)

    def slow(job: LoadJob, queued: QueuedJob) -> Any:
        if job is load:
            queued.cancelled.wait(20)
        return LMCacheEngineAdapter.load(engine, job, queued)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "load", slow)
        rank.step(StepPlan(loads=(load,)))
        rank.step(StepPlan(starts_over=True, loads=(empty,)))
        rank.finish(load, empty)
    assert rank.results[load.job_id].outcome is Outcome.CANCELLED
    assert all(map(torch.equal, kept, rank.instance.blocks(LOADED)))
    assert rank.results[-1].num_chunks == 0
    check_hit(rank)
