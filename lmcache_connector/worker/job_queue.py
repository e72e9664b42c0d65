"""Runs the jobs of one rank, and keeps the state of each job until it is reported.

A *lane* is a thread that runs jobs of one kind, so that no job waits behind an unrelated slower
one:

- the *store lane* runs stores in planning order. Each waits for the forward pass that fills its
  blocks, and a moment longer unless another job or instance waits for it;
- the *audit lane* runs audits, which start like stores and may then wait for Redis or a peer;
- the *CPU lane* runs loads from the CPU tier;
- *fetch lanes* run loads that may need Redis or a peer.

A load waits for the store that it depends on. A load that may fetch also waits while another job
fetches one of its chunks, and then finds it in the CPU tier if the tier keeps it. A load into
blocks that a forward pass still uses waits for that pass, but occupies no lane, and its deadline
begins only then: recomputing would have to wait too. Of loads that can run, small ones overtake
large ones that came a little earlier. A load whose deadline passes while it waits ends at once,
even if all lanes are busy.

One lock guards all state. It is held briefly, never while a job runs. Lanes of stores, lanes of
loads and the step's thread are woken for their own events only: threads that wake compete with the
engine's step for the interpreter lock.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from lmcache_connector.plans import AuditJob, JobResult, LoadJob, Outcome, StoreJob
from lmcache_connector.threads import start_thread

if TYPE_CHECKING:
    from lmcache_connector.copy_kv_blocks.copier import Fence
    from lmcache_connector.worker.paged_part import PagedPart

logger = logging.getLogger(__name__)

Job = LoadJob | StoreJob

_SECONDS_AFTER_FAILURE = 0.5  # of ``between_stores``
_AGE_PER_CHUNK_SECONDS = 0.010
"""A load overtakes another one that came up to this much earlier per chunk of size difference. The
limit prevents starvation."""
_FENCE_LOOK_SECONDS = 0.001
"""Seconds between two polls of the fences; a poll takes a few microseconds."""
_MAX_FENCE_SECONDS = 60.0
"""No forward pass takes longer."""
BY_TURN = attrgetter("turn", "job.job_id")
"""Among equal turns, the job that was planned first."""


class StepGate:
    """Open from the arrival of a step's plan, which cancels the stores whose blocks the step
    overwrites, to the step's end; always open where vLLM does not zero blocks.

    A copy that ends while the gate is open, and is not cancelled, has read valid blocks. A copy
    that ends between steps may have read zeros: vLLM's model runner V2 zeroes reused blocks before
    it hands over the plan. Such a copy waits for the plan, which cancels the copy in this case.
    """

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._is_shut = False

    def open(self) -> None:
        """The plan's cancellations have been made."""
        if not self._open.is_set():
            self._open.set()

    def close(self) -> None:
        """The step has ended."""
        if not self._is_shut:
            self._open.clear()

    def shut(self) -> None:
        """No further plan will come: copies that have not passed are void."""
        self._is_shut = True
        self._open.set()

    def passes(self, cancelled: threading.Event) -> bool:
        """Whether a finished copy may be kept. Waits for the next step at most."""
        was_open = self._open.is_set() and not self._is_shut
        self._open.wait()
        return not cancelled.is_set() and (was_open or not self._is_shut)


@dataclass(slots=True, eq=False)
class QueuedJob:
    """A submitted job. ``cancelled`` may be set at any time; the lane polls it. Times are readings
    of the queue's clock.

    ``gate``: decides whether copies out of the paged cache are kept. ``parts``: the job's caches,
    if not the engine's. ``may_begin``: called on the lane; if false, the job ends cancelled.

    A store begins no earlier than ``not_before``, unless another job or thread waits for it. A load
    begins once its fence ``is_passed``, and gives up at its ``deadline``. ``turn``: jobs with
    smaller ones begin first.
    """

    job: Job
    fence: Fence | None
    submitted_at: float
    gate: StepGate = field(default_factory=StepGate)
    parts: Sequence[PagedPart] = ()
    may_begin: Callable[[], bool] | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    reads_blocks: bool = True
    not_before: float = field(init=False)
    is_passed: bool = field(init=False, default=True)
    deadline: float = field(init=False, default=inf)
    turn: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.not_before = self.submitted_at
        if isinstance(self.job, LoadJob):
            self.is_passed = self.fence is None
            self.deadline = self.submitted_at + self.job.deadline_seconds
            if not self.is_passed:
                self.deadline += _MAX_FENCE_SECONDS
            self.turn = self.submitted_at + len(self.job.keys) * _AGE_PER_CHUNK_SECONDS

    def check_fence(self, now: float) -> bool:
        """Whether the forward passes before a load have ended: then its deadline begins. If one has
        failed, the load is cancelled."""
        try:
            if self.fence is not None and not self.fence.query():
                return False
        except Exception:
            logger.exception("A forward pass that a load waits for has failed")
            self.cancelled.set()
        self.is_passed = True
        self.deadline += now - self.submitted_at - _MAX_FENCE_SECONDS
        return True


class WaitingJobs(list[QueuedJob]):
    """Jobs for lanes of one kind, sorted by turn. ``open_jobs``: ids of jobs that have not ended.
    ``fetching``: chunks that lanes are fetching."""

    def __init__(self, open_jobs: Collection[int], fetching: Set[bytes]) -> None:
        super().__init__()
        self._open_jobs = open_jobs
        self._fetching = fetching

    def next(self, now: float) -> tuple[QueuedJob | None, float]:
        """Remove and return the job to begin. If none may begin: ``None``, and the seconds until
        the next look; look sooner if a job ends whose store or chunks a load waits for."""
        if self and isinstance(self[0].job, StoreJob):  # the others come after it
            left = self[0].not_before - now
            return (None, left) if left > 0.0 else (self.pop(0), 0.0)
        behind_passes = [queued for queued in self if not queued.is_passed]
        behind_passes.sort(key=attrgetter("submitted_at", "job.job_id"), reverse=True)
        while behind_passes and behind_passes[-1].check_fence(now):  # passes end in order
            behind_passes.pop()
        for queued in self:
            job = queued.job
            if queued.is_passed and not (
                isinstance(job, StoreJob)
                or job.after_job in self._open_jobs
                or (job.may_fetch and not self._fetching.isdisjoint(job.keys))
            ):
                self.remove(queued)
                return queued, 0.0
        return None, _FENCE_LOOK_SECONDS if behind_passes else inf


class JobQueue:
    """``run(queued)`` executes one job on a lane and returns its result. ``is_busy``: whether a job
    is open, or its result not taken; a plain attribute, cheap to poll every step.

    Stores begin ``store_delay_seconds`` late, unless another job or instance waits for them: the
    step's tokens are sampled and sent first. ``on_executed`` is called after each job, on the lane
    that ran it, and for each refused job; ``between_stores`` on the store lane if no store is
    ready: it returns seconds to the next call.
    """

    def __init__(
        self,
        run: Callable[[QueuedJob], JobResult],
        num_fetch_lanes: int,
        clock: Callable[[], float] = time.monotonic,
        store_delay_seconds: float = 0.0,
        on_executed: Callable[[Job], None] = lambda job: None,
        between_stores: Callable[[], float] | None = None,
    ) -> None:
        self._run = run
        self._between_stores = between_stores
        self._between_at = float("-inf")
        self._on_executed = on_executed
        self._store_delay = store_delay_seconds
        self._clock = clock
        self.is_busy = False
        # Not a Lock: a signal could end a condition's wait before the thread has reacquired it.
        self._lock = threading.RLock()
        self._store_came = threading.Condition(self._lock)  # for the store lane
        self._load_may_run = threading.Condition(self._lock)  # for the other lanes
        self._job_ended = threading.Condition(self._lock)  # for the step thread
        self._open: dict[int, QueuedJob] = {}
        self._fetching: set[bytes] = set()  # by the fetch lanes
        # Jobs that no lane has begun.
        waiting = partial(WaitingJobs, self._open.keys(), self._fetching)
        self._stores, self._audits = waiting(), waiting()
        self._loads = self._cpu_loads, self._fetching_loads = waiting(), waiting()
        self._ended: list[tuple[Job, JobResult]] = []
        self._stopping = False
        lanes = [("lmc-store", self._stores), ("lmc-audit", self._audits)]
        lanes.append(("lmc-load-cpu", self._cpu_loads))
        lanes += [(f"lmc-load-fetch-{i}", self._fetching_loads) for i in range(num_fetch_lanes)]
        self._lanes = [start_thread(name, self._work, waiting) for name, waiting in lanes]

    # -- the engine's step thread --------------------------------------------------------------

    def submit(
        self,
        job: Job,
        fence: Fence | None,
        *,
        gate: StepGate | None = None,
        parts: Sequence[PagedPart] = (),
        may_begin: Callable[[], bool] | None = None,
    ) -> None:
        """Queue a job. ``fence`` marks the compute that the copy must wait for. Other arguments:
        see :class:`QueuedJob`."""
        queued = QueuedJob(job, fence, self._clock(), gate or StepGate(), parts, may_begin)
        with self._lock:
            self.is_busy = True
            if isinstance(job, StoreJob):
                queued.not_before += self._store_delay
                waiting = self._audits if isinstance(job, AuditJob) else self._stores
                is_awaited, wake = job.is_awaited, self._store_came
            else:
                waiting = self._fetching_loads if job.may_fetch else self._cpu_loads
                is_awaited, wake = job.after_job in self._open, self._load_may_run
            insort(waiting, queued, key=BY_TURN)
            self._open[job.job_id] = queued  # last: an interrupt may come anywhere above
            if is_awaited:  # not this store alone, because stores run in order
                self._begin_stores()
            wake.notify_all()

    def refuse(self, jobs: Iterable[Job]) -> None:
        """End each of ``jobs`` that was not submitted, as cancelled."""
        with self._lock:
            known = {*self._open, *(job.job_id for job, _ in self._ended)}
        for job in jobs:
            if job.job_id not in known:
                self._executed(job)  # first: an interrupt may come anywhere
                with self._lock:
                    self._ended.append((job, JobResult(job.job_id, Outcome.CANCELLED, 0, 0, 0.0)))
                    self.is_busy = True

    def cancel(self, job_ids: Iterable[int] | None = None) -> None:
        """Ask jobs, by default all, to end early. Copies of a cancelled store are dropped."""
        with self._lock:
            for job_id in tuple(self._open if job_ids is None else job_ids):
                if (queued := self._open.get(job_id)) is None:
                    continue
                queued.cancelled.set()
                for waiting in self._loads:
                    if queued in waiting:
                        self._end_waiting(waiting, queued, Outcome.CANCELLED)
            self._load_may_run.notify_all()

    def wait_for_result(self, seconds: float) -> None:
        """Sleep until a job ends, at most ``seconds``; not at all if none is open."""
        until = self._clock() + seconds
        with self._lock:
            self._begin_stores()
            while self._open:
                self._end_overdue()
                left = until - self._clock()
                if self._ended or left <= 0:
                    return
                self._job_ended.wait(min(left, self._seconds_to_a_deadline()))

    def take_ended(self) -> list[tuple[Job, JobResult]]:
        """Jobs that ended since the last call, in the order they ended."""
        with self._lock:
            self._end_overdue()
            ended, self._ended = self._ended, []
            self.is_busy = bool(self._open)
            return ended

    @property
    def num_open(self) -> int:
        return len(self._open)

    def finish_stores(self, seconds: float) -> None:
        """Wait until no job reads the paged cache; after ``seconds`` cancel those that do."""
        with self._lock:
            self._begin_stores()
            self._job_ended.wait_for(lambda: not self._open_stores(), timeout=seconds)
            for queued in self._open_stores():
                queued.cancelled.set()

    def cancel_all(self, seconds: float) -> bool:
        """Cancel everything. False if a job still runs after ``seconds``."""
        self.cancel()
        with self._lock:
            self._begin_stores()
            return self._job_ended.wait_for(lambda: not self._open, timeout=seconds)

    def close(self, seconds: float) -> bool:
        """Cancel everything and stop the lanes. False if one is still busy after ``seconds``."""
        self.cancel()
        with self._lock:
            self._stopping = True
            self._begin_stores()
            self._store_came.notify_all()
            self._load_may_run.notify_all()
        end = self._clock() + seconds
        for lane in self._lanes:
            lane.join(max(0.0, end - self._clock()))
        return not any(lane.is_alive() for lane in self._lanes)

    def has_read(self, queued: QueuedJob) -> None:
        """The job no longer needs its blocks."""
        with self._lock:
            queued.reads_blocks = False
            self._job_ended.notify_all()

    # -- the lanes -----------------------------------------------------------------------------

    def _work(self, waiting: WaitingJobs) -> None:
        while (queued := self._next(waiting)) is not None:
            result = self._execute(queued)
            self._executed(queued.job)
            with self._lock:
                if waiting is self._fetching_loads:
                    self._fetching.difference_update(queued.job.keys)
                self._end(queued, result)

    def _executed(self, job: Job) -> None:
        try:
            self._on_executed(job)
        except Exception:  # keep the lane alive, and report the job
            logger.exception("Work after a job of request %s failed", job.request_id)

    def _next(self, waiting: WaitingJobs) -> QueuedJob | None:
        """Wait for the lane's next job and return it; ``None``: the lane must stop."""
        is_of_stores = waiting is self._stores or waiting is self._audits
        wake = self._store_came if is_of_stores else self._load_may_run
        with self._lock:
            while True:
                self._end_overdue()
                queued, look = waiting.next(self._clock())
                if queued is not None and queued.job.job_id not in self._open:
                    continue  # whoever submitted it was interrupted
                if queued is not None:
                    if waiting is self._fetching_loads:
                        self._fetching.update(queued.job.keys)
                    return queued
                if self._stopping and not waiting:
                    return None
                if waiting is self._stores and self._between_stores is not None:
                    look = min(look, self._call_when_due(self._between_stores))
                wake.wait(min(look, self._seconds_to_a_deadline()))

    def _call_when_due(self, between_stores: Callable[[], float]) -> float:
        """Call ``between_stores`` if due, releasing the caller's lock. Returns the seconds left."""
        if (left := self._between_at - self._clock()) > 0.0:
            return left
        pause = _SECONDS_AFTER_FAILURE
        self._lock.release()
        try:
            pause = between_stores()
        except Exception:  # the next call may succeed
            logger.exception("Chunks could not be offered to Redis again")
        finally:
            self._lock.acquire()
        self._between_at = self._clock() + pause
        return 0.0  # a job may have come meanwhile

    def _open_stores(self) -> list[QueuedJob]:
        return [q for q in self._open.values() if isinstance(q.job, StoreJob) and q.reads_blocks]

    def _begin_stores(self) -> None:
        """End the delay of all stores and audits: another job or thread waits for them."""
        delayed = [*self._stores, *self._audits]
        for queued in delayed:
            queued.not_before = queued.submitted_at
        if delayed:
            self._store_came.notify_all()

    def _end_overdue(self) -> None:
        """End waiting loads whose deadline has passed."""
        now = self._clock()
        for waiting in self._loads:
            for queued in [each for each in waiting if each.deadline <= now]:
                self._end_waiting(waiting, queued, Outcome.DEADLINE)

    def _end_waiting(self, waiting: WaitingJobs, queued: QueuedJob, outcome: Outcome) -> None:
        waiting.remove(queued)
        waited = self._clock() - queued.submitted_at
        result = JobResult(queued.job.job_id, outcome, 0, 0, 0.0, waited_seconds=waited)
        self._end(queued, result)

    def _seconds_to_a_deadline(self) -> float:
        """Seconds until the next deadline of a waiting job, which wakes no lane by itself."""
        deadlines = (queued.deadline for waiting in self._loads for queued in waiting)
        seconds = min(deadlines, default=threading.TIMEOUT_MAX) - self._clock()
        return min(max(0.0, seconds), threading.TIMEOUT_MAX)

    def _end(self, queued: QueuedJob, result: JobResult) -> None:
        self._open.pop(queued.job.job_id, None)
        self._ended.append((queued.job, result))
        self._job_ended.notify_all()
        # A lane that must stop waits until its last job is gone.
        if any(self._loads) or self._stopping:
            self._load_may_run.notify_all()

    def _execute(self, queued: QueuedJob) -> JobResult:
        job, started = queued.job, self._clock()
        try:
            may_begin = queued.may_begin
            if queued.cancelled.is_set() or (may_begin is not None and not may_begin()):
                return JobResult(job.job_id, Outcome.CANCELLED, 0, 0, 0.0)
            waited = max(0.0, started - queued.not_before)
            return replace(self._run(queued), waited_seconds=waited)
        except Exception:  # only this job fails; the lane lives on
            logger.exception("%s of request %s failed", type(job).__name__, job.request_id)
            return JobResult(job.job_id, Outcome.FAILED, 0, 0, self._clock() - started)
