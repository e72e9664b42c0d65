"""Jobs that no lane has begun: their order, and their context.

Stores, and audits, begin in planning order. A load waits for the forward passes that may use its
blocks, for the store that it depends on, and for chunks that a lane is fetching. Of the loads that
wait for nothing, the one whose turn came first is next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
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
BY_TURN = attrgetter("turn", "job.job_id")
"""Among equal turns, the job that was planned first."""


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
            logger.exception("A forward pass that a load waits for")
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
        """Remove and return the job that is to begin; ``None``, and the seconds until one may begin
        if no job ends before: then a load may that depends on the job's store or chunks."""
        if self and isinstance(self[0].job, StoreJob):  # the others come after it
            left = self[0].not_before - now
            return (None, left) if left > 0.0 else (self.pop(0), 0.0)
        behind_passes = [queued for queued in self if not queued.is_passed]
        behind_passes.sort(key=attrgetter("submitted_at"), reverse=True)
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
