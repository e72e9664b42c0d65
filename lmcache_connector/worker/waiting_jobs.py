"""Jobs that no lane has begun: their order, and their context.

Stores, and audits, begin in planning order. A load waits for the forward passes that may use its
blocks, for the store that it depends on, and for chunks that a lane is fetching. Of the loads that
wait for nothing, the one whose turn came first is next.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from lmcache_connector.plans import LoadJob, StoreJob

if TYPE_CHECKING:
    from lmcache_connector.copy_kv_blocks.copier import Fence
    from lmcache_connector.worker.paged_part import PagedPart

logger = logging.getLogger(__name__)

Job = LoadJob | StoreJob

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
    fence was found reached.

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

    @property
    def deadline(self) -> float:
        """When a load gives up, a reading of the queue's clock."""
        job = self.job
        seconds = inf if isinstance(job, StoreJob) else job.deadline_seconds
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
        """Jobs with smaller ones begin first; among equals, those that were planned first."""
        if isinstance(self.job, StoreJob):
            return 0.0
        return self.submitted_at + len(self.job.keys) * _AGE_PER_CHUNK_SECONDS


class WaitingJobs:
    """Jobs for lanes of one kind, by turn. ``open_jobs``: ids of jobs that have not ended.
    ``fetching``: chunks that lanes are fetching."""

    def __init__(self, open_jobs: Collection[int], fetching: Set[bytes]) -> None:
        self._open_jobs = open_jobs
        self._fetching = fetching
        self._jobs: list[tuple[float, int, QueuedJob]] = []
        self._next_deadline = inf  # or earlier

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[QueuedJob]:
        return (queued for *_, queued in self._jobs)

    def add(self, queued: QueuedJob) -> None:
        entry, deadline = (queued.turn, queued.job.job_id, queued), queued.deadline
        insort(self._jobs, entry)
        self._next_deadline = min(self._next_deadline, deadline)

    def next(self, now: float) -> QueuedJob | None:
        """Remove and return the job that is to begin."""
        behind_passes = (queued for queued in self if queued.fenced_at is None)
        for queued in sorted(behind_passes, key=lambda each: each.submitted_at):
            if not queued.check_fence(now):  # passes end in order
                break
            self._next_deadline = min(self._next_deadline, queued.deadline)
        for _, job_id, queued in self._jobs:
            if queued.fenced_at is not None and not self._must_wait(queued, now):
                return self.remove(job_id)
            if isinstance(queued.job, StoreJob):  # the others come after it
                return None
        return None

    def remove(self, job_id: int) -> QueuedJob | None:
        """Remove and return the job; ``None`` if it does not wait here."""
        for at, (_, each, queued) in enumerate(self._jobs):
            if each == job_id:
                del self._jobs[at]
                return queued
        return None

    def overdue(self, now: float) -> list[QueuedJob]:
        """Remove and return jobs whose deadline has passed."""
        if now < self._next_deadline:
            return []
        late = [queued for queued in self if queued.deadline <= now]
        for queued in late:
            self.remove(queued.job.job_id)
        self._next_deadline = min((queued.deadline for queued in self), default=inf)
        return late

    def seconds_to_look(self, now: float) -> float:
        """Seconds until `next` may return a job, if no job ends before."""
        first = next(iter(self), None)
        if first is not None and isinstance(first.job, StoreJob):
            return first.not_before - now
        are_passed = all(queued.fenced_at is not None for queued in self)
        return inf if are_passed else _FENCE_LOOK_SECONDS

    def seconds_to_deadline(self, now: float) -> float:
        """Seconds until `overdue` may return a job."""
        return self._next_deadline - now

    def _must_wait(self, queued: QueuedJob, now: float) -> bool:
        """Whether a store's delay has not ended, a store that a load depends on has not, or a chunk
        of a load is being fetched."""
        job = queued.job
        if isinstance(job, StoreJob):
            return now < queued.not_before
        if job.after_job in self._open_jobs:
            return True
        return job.may_fetch and not self._fetching.isdisjoint(job.keys)
