"""Jobs that no lane has begun yet, which of them is next, and what they are run with.

::

    behind a forward pass -> ready -> begun
                              |  ^
                              v  |
    behind a store, or behind a chunk that a lane is fetching

A load is looked at when it is the next one, and when what it waits for has ended: what else waits
costs nothing. Of the loads that wait for one chunk, one is called when the chunk has come: as it
wants the chunk too, the others would only wait for that one.
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
"""A load passes another if it comes less than that later for each chunk it is smaller by. So
nothing waits for ever."""
_FENCE_LOOK_SECONDS = 0.001
"""Nobody says when a fence is reached. One look takes some microseconds."""
_MAX_FENCE_SECONDS = 60.0
"""No forward pass takes longer."""
_SLACK = 64
"""Entries of a heap that may be of jobs that have ended, beside as many as wait."""


class StepGate:
    """Open while a step is under way, from when its plan has said which blocks it overwrites.

    Blocks change only in a step whose plan names them. A copy that ends while the gate is open has
    read nothing of the kind. One that ends between two steps may have: where reused blocks are
    zeroed, vLLM's model runner V2 does that before it hands over the plan. So it waits for the
    plan, which cancels it if it names its blocks.
    """

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._is_shut = False

    def open(self) -> None:
        """The plan's cancellations are made."""
        if not self._open.is_set():
            self._open.set()

    def close(self) -> None:
        """The step has ended."""
        if not self._is_shut:
            self._open.clear()

    def shut(self) -> None:
        """There will be no further plan: what has not passed is lost."""
        self._is_shut = True
        self._open.set()

    def passes(self, cancelled: threading.Event) -> bool:
        """Whether what was copied until now may be kept. Waits for the next step at most."""
        was_open = self._open.is_set()
        self._open.wait()
        return not cancelled.is_set() and (was_open or not self._is_shut)


_OPEN_GATE = StepGate()  # which nobody closes


@dataclass(frozen=True, slots=True)
class JobContext:
    """What a job is run with beside its plan.

    ``gate``: what passes it of the copies out of the paged cache may be kept. ``parts``: the caches
    of this job, where these are not the engine's own. ``may_begin``: asked on the lane; a job that
    may not begin ends cancelled.
    """

    gate: StepGate = _OPEN_GATE
    parts: Sequence[PagedPart] = ()
    may_begin: Callable[[], bool] = lambda: True


NO_CONTEXT = JobContext()


@dataclass(slots=True)
class QueuedJob:
    """A submitted job. ``cancelled`` may be set at any time; whoever runs the job looks at it.

    ``submitted_at`` and ``not_before`` are readings of the queue's clock. A store begins no earlier
    than ``not_before``, unless somebody waits for it. ``fenced_at``: when a load's fence was seen
    to be reached. ``result`` is set when the job has ended.
    """

    job: Job
    fence: Fence | None
    submitted_at: float
    not_before: float
    fenced_at: float | None = None
    context: JobContext = NO_CONTEXT
    cancelled: threading.Event = field(default_factory=threading.Event)
    reads_blocks: bool = True
    result: JobResult | None = None

    @property
    def deadline(self) -> float:
        """When a job from a tier gives up, a reading of the queue's clock."""
        job = self.job
        seconds = 3600.0
        if isinstance(job, LoadJob | AuditJob | PrefetchJob):
            seconds = job.deadline_seconds
        if self.fenced_at is None:
            return self.submitted_at + _MAX_FENCE_SECONDS + seconds
        return self.fenced_at + seconds

    def look_at_fence(self, now: float) -> bool:
        """Whether the load may begin, as far as forward passes go. After one that has failed it
        ends, cancelled."""
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
    """In the order in which they were planned."""

    def next(self, now: float) -> QueuedJob | None:
        """Takes out the one that may begin."""
        return self.popleft() if self and now >= self[0].not_before else None

    def seconds_to_look(self, now: float) -> float:
        """Until `next` may find one, if no job ends before."""
        return self[0].not_before - now if self else float("inf")


class WaitingLoads:
    """Loads, or prefetches, for lanes of one kind. ``open_jobs``: ids of those that have not ended.
    ``brought``: the chunks that lanes are fetching."""

    def __init__(self, open_jobs: Collection[int], brought: Collection[bytes]) -> None:
        self._open_jobs = open_jobs
        self._brought = brought
        self._waiting: dict[int, QueuedJob] = {}
        self._behind_passes: deque[QueuedJob] = deque()
        # Heaps by turn. Some entries are of jobs that have ended. The last item is the chunk for
        # which the load was called.
        self._ready: list[tuple[float, int, bytes | None]] = []
        self._behind: dict[int | bytes, list[tuple[float, int]]] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; some have begun or ended

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, queued: QueuedJob) -> None:
        job_id, turn, deadline = queued.job.job_id, queued.turn, queued.deadline
        self._forget_ended()  # jobs may come and end without a lane that takes any
        # Nothing raises from here on: a job that waits is whole.
        self._waiting[job_id] = queued
        heapq.heappush(self._deadlines, (deadline, job_id))
        if queued.fenced_at is None:
            self._behind_passes.append(queued)
        else:
            heapq.heappush(self._ready, (turn, job_id, None))

    def next(self, now: float) -> QueuedJob | None:
        """Takes out the one that is to begin."""
        self._look_at_fences(now)
        while self._ready:
            turn, job_id, called_for = heapq.heappop(self._ready)
            queued = self._waiting.get(job_id)
            blocker = self._blocker(queued.job) if queued is not None else None
            if queued is not None and blocker is None:
                return self._waiting.pop(job_id)
            if blocker is not None:
                heapq.heappush(self._behind.setdefault(blocker, []), (turn, job_id))
            if called_for is not None:
                self._call_one(called_for)  # another in its stead
        return None

    def remove(self, job_id: int) -> QueuedJob | None:
        """``None``: it does not wait here."""
        return self._waiting.pop(job_id, None)

    def overdue(self, now: float) -> Iterator[QueuedJob]:
        """Takes out those whose deadline has passed."""
        while self._deadlines:
            at, job_id = self._deadlines[0]
            if job_id in self._waiting and at > now:
                return
            heapq.heappop(self._deadlines)
            if (queued := self.remove(job_id)) is not None:
                yield queued

    def job_ended(self, job_id: int) -> None:
        """Loads may have waited for that store."""
        for turn, waiting_id in self._behind.pop(job_id, ()):
            heapq.heappush(self._ready, (turn, waiting_id, None))

    def came(self, keys: Iterable[bytes]) -> None:
        """No lane is bringing these chunks any more."""
        if self._behind:
            for key in keys:
                self._call_one(key)

    def seconds_to_look(self, now: float) -> float:
        """Until `next` may find one, if no job ends before."""
        return _FENCE_LOOK_SECONDS if self._behind_passes else float("inf")

    def seconds_to_deadline(self, now: float) -> float:
        """Until `overdue` may find one."""
        return self._deadlines[0][0] - now if self._deadlines else float("inf")

    def _forget_ended(self) -> None:
        most, waiting = 2 * len(self._waiting) + _SLACK, self._waiting
        if len(self._ready) > most:
            self._ready = [each for each in self._ready if each[1] in waiting or each[2]]
            heapq.heapify(self._ready)
        if len(self._deadlines) > most:
            self._deadlines = [each for each in self._deadlines if each[1] in waiting]
            heapq.heapify(self._deadlines)

    def _look_at_fences(self, now: float) -> None:
        """Passes run in order: behind one that runs, no fence is reached."""
        passes = self._behind_passes
        while passes and (passes[0].result is not None or passes[0].look_at_fence(now)):
            queued = passes.popleft()
            if queued.job.job_id in self._waiting:
                self.add(queued)  # with the deadline that it has now

    def _blocker(self, job: Job) -> int | bytes | None:
        """The store that the load waits for, or a chunk."""
        if not isinstance(job, LoadJob):
            return None
        if job.after_job in self._open_jobs:
            return job.after_job
        if not job.may_fetch:
            return None
        return next(filter(self._brought.__contains__, job.keys), None)

    def _call_one(self, key: bytes) -> None:
        """Of the loads that wait for the chunk, the one whose turn it is."""
        heap = self._behind.get(key)
        if heap and key not in self._brought:
            turn, job_id = heapq.heappop(heap)
            heapq.heappush(self._ready, (turn, job_id, key))
            if not heap:
                del self._behind[key]
