"""Runs jobs on lanes of the worker side, and keeps the state of each until it is reported.

Three kinds of lanes, so that nobody waits behind something slower that it has nothing to do with:

- *store*: stores, one after the other in the order they were planned. Each waits for the forward
  pass that fills its blocks, and a moment longer unless somebody waits for it;
- *load*: loads from memory;
- *fetch*: loads that may need Redis.

A load waits for the store it relies on. A fetch whose chunks another one is bringing waits for that
one, and then finds them in memory: however many requests want a chunk, it is fetched once. Among
loads that wait for nothing, small ones pass large ones that came a little earlier. A load whose
deadline passes while it waits is over at once, even if all lanes are busy.

One lock guards all state. It is held for a few instructions at a time, never while a job runs.
Nobody is woken for news of others: each thread that wakes wants the interpreter lock from the step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_connector.plans import JobResult, LoadJob, Outcome, StoreJob

if TYPE_CHECKING:
    from lmcache_connector.copy_kv_blocks.copier import Fence

logger = logging.getLogger(__name__)

Job = LoadJob | StoreJob

_AGE_PER_CHUNK_SECONDS = 0.010
"""A load passes another if it comes less than that later for each chunk it is smaller by. So
nothing waits for ever."""


@dataclass(slots=True)
class QueuedJob:
    """A submitted job. ``cancelled`` may be set at any time; whoever runs the job looks at it.

    ``not_before``: a store begins no earlier, unless somebody waits for it; a reading of the clock.
    """

    job: Job
    fence: Fence | None
    submitted_at: float
    not_before: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    result: JobResult | None = None

    @property
    def deadline(self) -> float:
        """When a load gives up, in ``time.monotonic`` seconds."""
        seconds = self.job.deadline_seconds if isinstance(self.job, LoadJob) else 3600.0
        return self.submitted_at + seconds


class JobQueue:
    """``run(running)`` executes one job on a lane's thread and returns its result.

    Stores begin ``store_delay_seconds`` late. Where those who copy need the cores that compute, the
    rest of the step goes first that way: its tokens are sampled and on their way out.
    """

    def __init__(
        self,
        run: Callable[[QueuedJob], JobResult],
        redis_lanes: int,
        clock: Callable[[], float] = time.monotonic,
        store_delay_seconds: float = 0.0,
    ) -> None:
        self._run = run
        self._store_delay = store_delay_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._store_came = threading.Condition(self._lock)  # for the store lane
        self._load_may_run = threading.Condition(self._lock)  # for the other lanes
        self._job_ended = threading.Condition(self._lock)  # for the step thread
        self._open: dict[int, QueuedJob] = {}
        self._stores: list[QueuedJob] = []
        self._loads: list[QueuedJob] = []
        self._fetches: list[QueuedJob] = []
        self._fetching: set[bytes] = set()  # chunks of the needs_redis that run
        self._done: list[QueuedJob] = []
        self._stopping = False
        lanes = [("lmc-store", self._stores), ("lmc-load", self._loads)]
        lanes += [(f"lmc-fetch-{i}", self._fetches) for i in range(redis_lanes)]
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=name, daemon=True)
            for name, queue in lanes
        ]
        for thread in self._threads:
            thread.start()

    # -- the engine's step thread --------------------------------------------------------------

    def submit(self, job: Job, fence: Fence | None) -> None:
        """``fence`` orders the copy after the compute submitted so far."""
        now = self._clock()
        with self._lock:
            if isinstance(job, StoreJob):
                queue, wake, not_before = self._stores, self._store_came, now + self._store_delay
            else:
                queue = self._fetches if job.needs_redis else self._loads
                wake, not_before = self._load_may_run, now
                if job.after_job in self._open:
                    self._begin_stores()
            self._open[job.job_id] = running = QueuedJob(job, fence, now, not_before)
            queue.append(running)
            wake.notify_all()

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Ask jobs to end early. What a cancelled store copied is dropped."""
        with self._lock:
            for job_id in job_ids:
                if job_id in self._open:
                    self._open[job_id].cancelled.set()
            self._load_may_run.notify_all()

    def settle(self, job_ids: Iterable[int], seconds: float) -> None:
        """Give jobs ``seconds`` to end, then cancel the rest."""
        wanted = set(job_ids)
        with self._lock:
            self._begin_stores()
            self._job_ended.wait_for(lambda: wanted.isdisjoint(self._open), timeout=seconds)
        self.cancel(wanted)

    def wait_for_result(self, seconds: float) -> None:
        """Sleep until a job ends, at most ``seconds``; at once if none is open or one has ended."""
        until = self._clock() + seconds
        with self._lock:
            self._begin_stores()
            while self._open:
                self._end_overdue()
                left = until - self._clock()
                if self._done or left <= 0:
                    return
                self._job_ended.wait(min(left, self._seconds_to_a_deadline()))

    def take_results(self) -> list[QueuedJob]:
        """Jobs that ended since the last call, in the order they ended."""
        with self._lock:
            self._end_overdue()
            done, self._done = self._done, []
            return done

    def is_open(self, job_id: int) -> bool:
        """Whether the job has not ended yet."""
        with self._lock:
            return job_id in self._open

    @property
    def is_busy(self) -> bool:
        """Whether a job is open, or its result not taken. Takes no lock."""
        return bool(self._open or self._done)

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    def close(self, seconds: float) -> bool:
        """Cancel everything and stop the lanes. False if one is still busy after ``seconds``."""
        self.cancel(list(self._open))
        with self._lock:
            self._stopping = True
            self._begin_stores()
            self._store_came.notify_all()
            self._load_may_run.notify_all()
        end = self._clock() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- the lanes -----------------------------------------------------------------------------

    def _work(self, queue: list[QueuedJob]) -> None:
        while (running := self._next(queue)) is not None:
            result = self._execute(running)
            with self._lock:
                if queue is self._fetches:
                    self._fetching.difference_update(running.job.keys)
                self._end(running, result)

    def _next(self, queue: list[QueuedJob]) -> QueuedJob | None:
        """The next job of a lane; waits for one. ``None``: the lane shall stop."""
        wake = self._store_came if queue is self._stores else self._load_may_run
        with self._lock:
            while True:
                self._end_overdue()
                running = self._pick(queue)
                if running is not None:
                    queue.remove(running)
                    if queue is self._fetches:
                        self._fetching.update(running.job.keys)
                    return running
                if self._stopping and not queue:
                    return None
                wake.wait(self._seconds_to_wait(queue))

    def _pick(self, queue: list[QueuedJob]) -> QueuedJob | None:
        if queue is self._stores:
            return queue[0] if queue and self._clock() >= queue[0].not_before else None
        ready = [running for running in queue if self._is_ready(running.job)]
        return min(ready, key=_turn, default=None)

    def _begin_stores(self) -> None:
        """Somebody waits for one of them."""
        for running in self._stores:
            running.not_before = running.submitted_at
        if self._stores:
            self._store_came.notify_all()

    def _is_ready(self, job: Job) -> bool:
        """Whether the load waits for no store and for nobody else's fetch."""
        if not isinstance(job, LoadJob):
            return True
        if job.after_job in self._open:
            return False
        return not job.needs_redis or self._fetching.isdisjoint(job.keys)

    def _end_overdue(self) -> None:
        """Loads that wait although they were cancelled or their deadline has passed."""
        now = self._clock()
        for queue in (self._loads, self._fetches):
            for running in [r for r in queue if r.cancelled.is_set() or now >= r.deadline]:
                queue.remove(running)
                cancelled = running.cancelled.is_set()
                outcome = Outcome.CANCELLED if cancelled else Outcome.DEADLINE
                self._end(running, JobResult(running.job.job_id, outcome, 0, 0, 0, 0.0))

    def _seconds_to_wait(self, queue: list[QueuedJob]) -> float:
        seconds = self._seconds_to_a_deadline()
        if queue is self._stores and queue:
            seconds = min(seconds, max(0.0, queue[0].not_before - self._clock()))
        return seconds

    def _seconds_to_a_deadline(self) -> float:
        """Of a load that waits: nobody else would notice."""
        deadlines = [running.deadline for running in (*self._loads, *self._fetches)]
        seconds = min(deadlines, default=float("inf")) - self._clock()
        return min(max(0.0, seconds), threading.TIMEOUT_MAX)

    def _end(self, running: QueuedJob, result: JobResult) -> None:
        running.result = result
        del self._open[running.job.job_id]
        self._done.append(running)
        self._job_ended.notify_all()
        # One of them may have waited for this job, or for the last job to be gone.
        if self._loads or self._fetches or self._stopping:
            self._load_may_run.notify_all()

    def _execute(self, running: QueuedJob) -> JobResult:
        job, started = running.job, self._clock()
        if running.cancelled.is_set():
            return JobResult(job.job_id, Outcome.CANCELLED, 0, 0, 0, 0.0)
        try:
            return self._run(running)
        except Exception:  # a job that raises fails alone; the lane lives on
            logger.exception("%s of request %s failed", type(job).__name__, job.request_id)
            return JobResult(job.job_id, Outcome.FAILED, 0, 0, 0, self._clock() - started)


def _turn(running: QueuedJob) -> float:
    return running.submitted_at + len(running.job.keys) * _AGE_PER_CHUNK_SECONDS
