"""Jobs that no lane has begun: their order, and their context.

::

    behind a forward pass -> ready -> begun
                              |  ^
                              v  |
    behind a store, or behind a chunk that a lane is fetching

A load is examined when it is first in line, and when its blocker has ended; otherwise waiting costs
nothing. When a chunk has arrived, one of the loads that wait for it is made ready. That load
occupies the chunk while it runs, so the others would have to wait again.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_connector.plans import AuditJob, JobResult, LoadJob, PrefetchJob, StoreJob

if TYPE_CHECKING:
    from lmcache_connector.copy_kv_blocks.copier import Fence
    from lmcache_connector.worker.paged_part import PagedPart

logger = logging.getLogger(__name__)

Job = LoadJob | StoreJob | PrefetchJob

_AGE_PER_CHUNK_SECONDS = 0.010
"""A load overtakes another one that came up to this much earlier per chunk of size difference. The
limit prevents starvation."""
_FENCE_LOOK_SECONDS = 0.001
"""Fences are polled, at a few microseconds each."""
_MAX_FENCE_SECONDS = 60.0
"""No forward pass takes longer."""
_SLACK = 64
"""Stale entries that a heap may have beyond one per waiting job."""


class StepGate:
    """Open from the arrival of a step's plan, which names the blocks it overwrites, to its end.

    Blocks change only in a step whose plan names them, so a copy that ends while the gate is open
    has read valid blocks. A copy that ends between steps may not have: vLLM's model runner V2
    zeroes reused blocks before it hands over the plan. Such a copy waits for the plan, which
    cancels it if it names its blocks.
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
        was_open = self._open.is_set()
        self._open.wait()
        return not cancelled.is_set() and (was_open or not self._is_shut)


@dataclass(slots=True)
class QueuedJob:
    """A submitted job. ``cancelled`` may be set at any time; the lane polls it.

    ``submitted_at`` and ``not_before`` are readings of the queue's clock. A store begins no earlier
    than ``not_before``, unless another job or thread waits for it. ``fenced_at``: when a load's
    fence was found reached. ``result`` is set when the job has ended.

    ``gate``: decides whether copies out of the paged cache are kept. ``parts``: the job's caches,
    if not the engine's. ``may_begin``: called on the lane; if false, the job ends cancelled.
    """

    job: Job
    fence: Fence | None
    submitted_at: float
    not_before: float
    fenced_at: float | None = None
    gate: StepGate = field(default_factory=StepGate)
    parts: Sequence[PagedPart] = ()
    may_begin: Callable[[], bool] | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    reads_blocks: bool = True
    result: JobResult | None = None

    @property
    def deadline(self) -> float:
        """When a load, audit or prefetch gives up, a reading of the queue's clock."""
        job = self.job
        seconds = 3600.0
        if isinstance(job, LoadJob | AuditJob | PrefetchJob):
            seconds = job.deadline_seconds
        if self.fenced_at is None:
            return self.submitted_at + _MAX_FENCE_SECONDS + seconds
        return self.fenced_at + seconds

    def check_fence(self, now: float) -> bool:
        """Whether the forward passes before the load have ended. If one has failed, the load is
        cancelled."""
        try:
            if self.fenced_at is None and (self.fence is None or self.fence.query()):
                self.fenced_at = now
        except Exception:
            logger.exception("A forward pass that a load waits for")
            self.fenced_at = now
            self.cancelled.set()
        return self.fenced_at is not None

    @property
    def turn(self) -> float:
        if isinstance(self.job, PrefetchJob):
            return self.submitted_at
        return self.submitted_at + len(self.job.keys) * _AGE_PER_CHUNK_SECONDS


class WaitingStores(deque[QueuedJob]):
    """Stores, or audits, in planning order."""

    def next(self, now: float) -> QueuedJob | None:
        """Remove and return the first job, if it may begin."""
        return self.popleft() if self and now >= self[0].not_before else None

    def seconds_to_look(self, now: float) -> float:
        """Seconds until `next` may return a job, if no job ends before."""
        return self[0].not_before - now if self else float("inf")


class WaitingLoads:
    """Loads, or prefetches, for lanes of one kind. ``open_jobs``: ids of jobs that have not ended.
    ``fetching``: chunks that lanes are fetching."""

    def __init__(self, open_jobs: Collection[int], fetching: Collection[bytes]) -> None:
        self._open_jobs = open_jobs
        self._fetching = fetching
        self._waiting: dict[int, QueuedJob] = {}
        self._behind_passes: deque[QueuedJob] = deque()
        # Heaps by turn; some entries are stale. The last item is the chunk whose arrival made the
        # load ready.
        self._ready: list[tuple[float, int, bytes | None]] = []
        self._behind: dict[int | bytes, list[tuple[float, int]]] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap with stale entries

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, queued: QueuedJob) -> None:
        job_id, turn, deadline = queued.job.job_id, queued.turn, queued.deadline
        self._forget_ended()  # jobs may come and end without a lane that takes any
        # Nothing raises below, so the job is in all containers.
        self._waiting[job_id] = queued
        heapq.heappush(self._deadlines, (deadline, job_id))
        if queued.fenced_at is None:
            self._behind_passes.append(queued)
        else:
            heapq.heappush(self._ready, (turn, job_id, None))

    def next(self, now: float) -> QueuedJob | None:
        """Remove and return the job that is to begin."""
        self._check_fences(now)
        while self._ready:
            turn, job_id, made_ready_by = heapq.heappop(self._ready)
            queued = self._waiting.get(job_id)
            blocker = self._blocker(queued.job) if queued is not None else None
            if queued is not None and blocker is None:
                return self._waiting.pop(job_id)
            if blocker is not None:
                heapq.heappush(self._behind.setdefault(blocker, []), (turn, job_id))
            if made_ready_by is not None:
                self._make_one_ready(made_ready_by)  # another in its stead
        return None

    def remove(self, job_id: int) -> QueuedJob | None:
        """Remove and return the job; ``None`` if it does not wait here."""
        return self._waiting.pop(job_id, None)

    def overdue(self, now: float) -> Iterator[QueuedJob]:
        """Remove and return jobs whose deadline has passed."""
        while self._deadlines:
            at, job_id = self._deadlines[0]
            if job_id in self._waiting and at > now:
                return
            heapq.heappop(self._deadlines)
            if (queued := self.remove(job_id)) is not None:
                yield queued

    def job_ended(self, job_id: int) -> None:
        """Make loads ready that waited for this job."""
        for turn, waiting_id in self._behind.pop(job_id, ()):
            heapq.heappush(self._ready, (turn, waiting_id, None))

    def fetch_ended(self, keys: Iterable[bytes]) -> None:
        """No lane is fetching these chunks any more."""
        if self._behind:
            for key in keys:
                self._make_one_ready(key)

    def seconds_to_look(self, now: float) -> float:
        """Seconds until `next` may return a job, if no job ends before."""
        return _FENCE_LOOK_SECONDS if self._behind_passes else float("inf")

    def seconds_to_deadline(self, now: float) -> float:
        """Seconds until `overdue` may return a job."""
        return self._deadlines[0][0] - now if self._deadlines else float("inf")

    def _forget_ended(self) -> None:
        most, waiting = 2 * len(self._waiting) + _SLACK, self._waiting
        if len(self._ready) > most:
            self._ready = [each for each in self._ready if each[1] in waiting or each[2]]
            heapq.heapify(self._ready)
        if len(self._deadlines) > most:
            self._deadlines = [each for each in self._deadlines if each[1] in waiting]
            heapq.heapify(self._deadlines)

    def _check_fences(self, now: float) -> None:
        """Forward passes run in order: if one still runs, no later fence is reached."""
        passes = self._behind_passes
        while passes and (passes[0].result is not None or passes[0].check_fence(now)):
            queued = passes.popleft()
            if queued.job.job_id in self._waiting:
                self.add(queued)  # with its deadline, now that it is known

    def _blocker(self, job: Job) -> int | bytes | None:
        """The store or the chunk that the job must wait for."""
        if not isinstance(job, LoadJob):
            return None
        if job.after_job in self._open_jobs:
            return job.after_job
        if not job.may_fetch:
            return None
        return next(filter(self._fetching.__contains__, job.keys), None)

    def _make_one_ready(self, key: bytes) -> None:
        """Make ready the first of the loads that wait for the chunk."""
        heap = self._behind.get(key)
        if heap and key not in self._fetching:
            turn, job_id = heapq.heappop(heap)
            heapq.heappush(self._ready, (turn, job_id, key))
            if not heap:
                del self._behind[key]
