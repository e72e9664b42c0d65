"""Jobs that no lane has begun: their order, and their context.

A load waits for the forward passes that may use its blocks, for the store that it depends on, and
for chunks that a lane is fetching. Of those that wait for nothing, the one whose turn came first is
next.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from lmcache_connector.plans import JobResult, LoadJob, PrefetchJob, StoreJob

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
        """When a load or prefetch gives up, a reading of the queue's clock."""
        job = self.job
        seconds = 3600.0
        if isinstance(job, LoadJob | PrefetchJob):
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
        return self[0].not_before - now if self else inf


class WaitingLoads:
    """Loads, or prefetches, for lanes of one kind. ``open_jobs``: ids of jobs that have not ended.
    ``fetching``: chunks that lanes are fetching."""

    def __init__(self, open_jobs: Collection[int], fetching: Set[bytes]) -> None:
        self._open_jobs = open_jobs
        self._fetching = fetching
        self._waiting: dict[int, QueuedJob] = {}
        self._behind_passes: deque[QueuedJob] = deque()
        self._by_turn: list[tuple[float, int, QueuedJob]] = []  # the others
        self._next_deadline = inf  # or earlier

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, queued: QueuedJob) -> None:
        job_id, turn, deadline = queued.job.job_id, queued.turn, queued.deadline
        # Nothing raises below, so the job is in all containers.
        self._next_deadline = min(self._next_deadline, deadline)
        self._waiting[job_id] = queued
        if queued.fenced_at is None:
            self._behind_passes.append(queued)
        else:
            insort(self._by_turn, (turn, job_id, queued))

    def next(self, now: float) -> QueuedJob | None:
        """Remove and return the job that is to begin."""
        self._check_fences(now)
        for _, job_id, queued in self._by_turn:
            if not self._must_wait(queued.job):
                return self.remove(job_id)
        return None

    def remove(self, job_id: int) -> QueuedJob | None:
        """Remove and return the job; ``None`` if it does not wait here."""
        if (queued := self._waiting.get(job_id)) is not None:
            self._by_turn = [each for each in self._by_turn if each[1] != job_id]
            del self._waiting[job_id]
        return queued

    def overdue(self, now: float) -> Iterator[QueuedJob]:
        """Remove and return jobs whose deadline has passed."""
        if now < self._next_deadline:
            return
        for job_id, queued in list(self._waiting.items()):
            if queued.deadline <= now:
                self.remove(job_id)
                yield queued
        self._next_deadline = min((each.deadline for each in self._waiting.values()), default=inf)

    def seconds_to_look(self, now: float) -> float:
        """Seconds until `next` may return a job, if no job ends before."""
        return _FENCE_LOOK_SECONDS if self._behind_passes else inf

    def seconds_to_deadline(self, now: float) -> float:
        """Seconds until `overdue` may return a job."""
        return self._next_deadline - now

    def _check_fences(self, now: float) -> None:
        """Forward passes run in order: if one still runs, no later fence is reached."""
        passes = self._behind_passes
        while passes and (passes[0].result is not None or passes[0].check_fence(now)):
            queued = passes.popleft()
            if queued.job.job_id in self._waiting:
                self.add(queued)  # with its deadline, now that it is known

    def _must_wait(self, job: Job) -> bool:
        """Whether a store that the job depends on has not ended, or a chunk of it is fetched."""
        if not isinstance(job, LoadJob):
            return False
        if job.after_job in self._open_jobs:
            return True
        return job.may_fetch and not self._fetching.isdisjoint(job.keys)
