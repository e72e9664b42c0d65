"""Order, cancelling and deadlines of jobs, and an end that always comes."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType, FunctionType
from typing import Any

import pytest

from lmcache_connector.plans import (
    AuditJob,
    JobResult,
    LoadJob,
    Outcome,
    StoreJob,
)
from lmcache_connector.worker.job_queue import Job, JobQueue, QueuedJob
from tests.support.jobs import load_job, store_job

LONG = 30.0  # seconds nothing here ever takes


def store(job_id: int) -> StoreJob:
    return store_job(job_id, f"r{job_id}", (b"k",), ((1,),))


def load(
    job_id: int,
    may_fetch: bool = False,
    after_job: int = 0,
    deadline_seconds: float = LONG,
    keys: tuple[bytes, ...] = (),
) -> LoadJob:
    return load_job(
        job_id,
        f"r{job_id}",
        keys or (b"chunk %d" % job_id,),
        ((1,),),
        deadline_seconds=deadline_seconds,
        may_fetch=may_fetch,
        after_job=after_job,
    )


class Runner:
    """Runs jobs when their gate opens; notes the order in which they start."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self._gates: dict[int, threading.Event] = {}
        self._started: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self.act: Callable[[QueuedJob], None] = lambda queued: None

    def gate(self, job_id: int) -> threading.Event:
        """From now on the job waits for this event."""
        with self._lock:
            return self._gates.setdefault(job_id, threading.Event())

    def started(self, job_id: int) -> threading.Event:
        with self._lock:
            return self._started.setdefault(job_id, threading.Event())

    def __call__(self, queued: QueuedJob) -> JobResult:
        job_id = queued.job.job_id
        with self._lock:
            self.order.append(job_id)
            gate = self._gates.get(job_id)
        self.started(job_id).set()
        if gate is not None:
            assert gate.wait(LONG)
        self.act(queued)
        cancelled = queued.cancelled.is_set()
        outcome = Outcome.CANCELLED if cancelled else Outcome.DONE
        return JobResult(job_id, outcome, 0 if cancelled else 1, 0, 0.0)


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def jobs(runner: Runner) -> Iterator[JobQueue]:
    jobs = JobQueue(runner, num_fetch_lanes=1)
    yield jobs
    assert jobs.close(LONG)


def wait_all(jobs: JobQueue) -> dict[int, JobResult]:
    results: dict[int, JobResult] = {}
    until = time.monotonic() + LONG
    while jobs.num_open:
        assert time.monotonic() < until, "a lane has ended, or waits for good"
        jobs.wait_for_result(1.0)
        results |= taken(jobs)
    return results | taken(jobs)


def taken(jobs: JobQueue) -> dict[int, JobResult]:
    return {job.job_id: result for job, result in jobs.take_ended()}


def interrupt(call: Callable[[], None], function: FunctionType, num_lines: int) -> bool:
    """Whether ``call`` was interrupted after it ran this many lines of the function."""
    seen = set[int]()  # the line of a `with` comes again at its end, where no signal is handled

    class Interrupt(BaseException):
        pass

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if event == "line" and frame.f_lineno not in seen:
            if len(seen) == num_lines:
                raise Interrupt
            seen.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_no_interrupt_finds_a_wait_without_its_lock(jobs: JobQueue, runner: Runner) -> None:
    """Otherwise Python would raise ``RuntimeError``, or release a lock that a lane holds."""
    gate = runner.gate(1)
    jobs.submit(load(1), None)
    takes_again = vars(threading.Condition)["_acquire_restore"]
    assert not interrupt(partial(jobs.wait_for_result, 0.1), takes_again, 0)
    gate.set()
    wait_all(jobs)


@pytest.mark.parametrize("make", [store, load])
def test_an_interrupted_submission_leaves_a_whole_job_or_none(
    jobs: JobQueue, runner: Runner, make: Callable[[int], Job]
) -> None:
    assert isinstance(JobQueue.submit, FunctionType)
    for job_id in itertools.count(1):
        gate, num_before = runner.gate(job_id), len(runner.order)
        submit = partial(jobs.submit, make(job_id), None)
        is_interrupted = interrupt(submit, JobQueue.submit, job_id - 1)
        is_open = jobs.num_open == 1
        gate.set()
        assert jobs.cancel_all(LONG)
        for other in (store(10_000 + job_id), load(20_000 + job_id)):
            jobs.submit(other, None)
        wait_all(jobs)
        assert len(runner.order) <= num_before + 2 + is_open
        if not is_interrupted:
            break
    assert job_id > 5


@pytest.mark.parametrize(
    "wait",
    [
        lambda jobs: jobs.submit(load(3, after_job=1), None),
        lambda jobs: jobs.submit(load(3, after_job=1, may_fetch=True), None),
        lambda jobs: jobs.wait_for_result(LONG),
        lambda jobs: jobs.submit(replace(store(3), is_awaited=True), None),
    ],
    ids=["a hit from memory", "a hit from Redis", "an idle step", "a store behind it"],
)
def test_a_delayed_store_begins_when_somebody_waits_for_it(
    runner: Runner, wait: Callable[[JobQueue], None]
) -> None:
    jobs = JobQueue(runner, num_fetch_lanes=1, store_delay_seconds=LONG)
    jobs.submit(store(1), None)
    jobs.submit(load(2), None)
    assert runner.started(2).wait(LONG)
    assert not runner.started(1).wait(0.05)
    wait(jobs)
    assert runner.started(1).wait(LONG / 2)
    wait_all(jobs)
    assert jobs.close(LONG)


def test_a_queue_with_a_delayed_store_closes_at_once(runner: Runner) -> None:
    jobs = JobQueue(runner, num_fetch_lanes=0, store_delay_seconds=LONG)
    jobs.submit(store(1), None)
    assert jobs.close(LONG / 2)
    assert taken(jobs)[1].outcome is Outcome.CANCELLED


def test_a_hit_from_memory_waits_for_the_store_it_relies_on_and_no_other(
    jobs: JobQueue, runner: Runner
) -> None:
    gates = [runner.gate(1), runner.gate(2)]
    jobs.submit(store(1), None)
    jobs.submit(store(2), None)
    jobs.submit(load(3, after_job=1), None)
    jobs.submit(load(4), None)
    assert runner.started(4).wait(LONG)
    assert 3 not in runner.order
    gates[0].set()
    assert runner.started(3).wait(LONG)
    gates[1].set()
    assert wait_all(jobs).keys() == {1, 2, 3, 4}


def test_chunks_are_fetched_once_however_many_want_them(runner: Runner) -> None:
    jobs = JobQueue(runner, num_fetch_lanes=3)
    gate = runner.gate(1)
    jobs.submit(load(1, may_fetch=True, keys=(b"a", b"b", b"c")), None)
    assert runner.started(1).wait(LONG)
    jobs.submit(load(2, may_fetch=True, keys=(b"a", b"b")), None)
    jobs.submit(load(3, may_fetch=True, keys=(b"c", b"d")), None)
    jobs.submit(load(4, may_fetch=True, keys=(b"e",)), None)  # wants something else
    jobs.wait_for_result(LONG)
    assert list(taken(jobs)) == [4]
    assert runner.order == [1, 4]
    gate.set()
    assert wait_all(jobs).keys() == {1, 2, 3}
    assert jobs.close(LONG)


def test_a_load_that_waits_is_over_at_its_deadline_though_all_lanes_are_busy(
    jobs: JobQueue, runner: Runner
) -> None:
    gate = runner.gate(1)
    jobs.submit(load(1, may_fetch=True, keys=(b"a",)), None)
    assert runner.started(1).wait(LONG)
    jobs.submit(load(2, may_fetch=True, keys=(b"a",), deadline_seconds=0.02), None)
    jobs.submit(load(3, may_fetch=True, keys=(b"b",), deadline_seconds=0.01), None)
    results: dict[int, JobResult] = {}
    while len(results) < 2:
        jobs.wait_for_result(LONG)
        results |= taken(jobs)
    assert {r.outcome for r in results.values()} == {Outcome.DEADLINE}
    assert not any(r.has_fetch_failed for r in results.values())  # nobody asked Redis
    gate.set()
    wait_all(jobs)
    assert runner.order == [1]


def test_a_lane_outlives_a_callback_that_raises(runner: Runner) -> None:
    """That call looks at LMCache's memory, for KV transfers, and may raise."""

    def told(job: Job) -> None:
        if job.job_id == 1:
            raise RuntimeError("boom")

    jobs = JobQueue(runner, num_fetch_lanes=0, on_executed=told)
    jobs.submit(store(1), None)
    jobs.submit(store(2), None)
    assert {result.outcome for result in wait_all(jobs).values()} == {Outcome.DONE}
    assert jobs.close(LONG)


def test_a_forward_pass_that_failed_ends_the_loads_behind_it(jobs: JobQueue) -> None:
    fences = [HeldFence(fails=True), HeldFence(is_reached=True)]
    for job_id, fence in enumerate(fences, 1):
        jobs.submit(load(job_id), fence)
    results = wait_all(jobs)
    assert [results[i].outcome for i in (1, 2)] == [Outcome.CANCELLED, Outcome.DONE]


def test_where_copies_must_not_outlast_a_step_stores_are_waited_for(runner: Runner) -> None:
    jobs = JobQueue(runner, num_fetch_lanes=0, store_delay_seconds=LONG)
    jobs.submit(store(1), None)
    jobs.finish_stores(LONG)
    assert taken(jobs)[1].outcome is Outcome.DONE
    gate = runner.gate(2)
    jobs.submit(store(2), None)
    jobs.finish_stores(0.05)
    gate.set()
    assert wait_all(jobs)[2].outcome is Outcome.CANCELLED
    assert jobs.close(LONG)


def test_an_audit_holds_up_neither_stores_nor_a_step_once_it_has_copied(
    jobs: JobQueue, runner: Runner
) -> None:
    """It may wait for Redis then."""
    gate = runner.gate(1)
    audit = store_job(
        1, "r1", (b"k",), ((1,),), job_type=AuditJob, may_fetch=True, deadline_seconds=LONG
    )
    jobs.submit(audit, None)
    assert runner.started(1).wait(LONG)
    jobs.submit(store(2), None)
    jobs.finish_stores(0.0)  # it still reads: cancelled
    (open_audit,) = [q for q in jobs._open.values() if q.job is audit]
    assert open_audit.cancelled.is_set()
    open_audit.cancelled.clear()
    jobs.has_read(open_audit)
    jobs.finish_stores(LONG)
    assert not open_audit.cancelled.is_set()
    assert 2 in taken(jobs)
    gate.set()
    assert wait_all(jobs)[1].outcome is Outcome.DONE


def test_close_is_bounded_when_a_job_hangs(runner: Runner) -> None:
    jobs = JobQueue(runner, num_fetch_lanes=0)
    gate = runner.gate(1)
    jobs.submit(store(1), None)
    assert runner.started(1).wait(LONG)
    assert jobs.close(0.0) is False
    gate.set()
    assert jobs.close(LONG)


@dataclass
class HeldFence:
    """Reached once it is told to be."""

    is_reached: bool = False
    fails: bool = False

    def query(self) -> bool:
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")
        return self.is_reached

    def elapsed_time(self, end: object, /) -> float:
        raise AssertionError("nobody times a load's fence")


def test_a_load_that_waits_for_a_forward_pass_holds_up_no_other(
    jobs: JobQueue, runner: Runner
) -> None:
    """Else of four loads from memory in a step of 300 ms, three miss their deadlines (measured)."""
    fence = HeldFence()
    jobs.submit(load(1), fence)
    for job_id in range(2, 5):
        jobs.submit(load(job_id), None)
    while jobs.num_open > 1:
        jobs.wait_for_result(LONG)
        taken(jobs)
    assert sorted(runner.order) == [2, 3, 4]
    fence.is_reached = True
    assert wait_all(jobs)[1].outcome is Outcome.DONE


def test_the_wait_for_a_forward_pass_is_not_on_the_deadlines_time(runner: Runner) -> None:
    """Recompute would wait for it as well."""
    now, fence = 0.0, HeldFence()
    jobs = JobQueue(runner, num_fetch_lanes=0, clock=lambda: now)
    seen: list[float] = []
    runner.act = lambda queued: seen.append(queued.deadline)
    jobs.submit(load(1, deadline_seconds=0.01), fence)
    now = 0.3
    assert taken(jobs) == {}
    fence.is_reached = True
    result = wait_all(jobs)[1]
    assert result.outcome is Outcome.DONE
    assert result.waited_seconds == pytest.approx(0.3)
    assert seen == [pytest.approx(0.31)]
    assert jobs.close(LONG)
