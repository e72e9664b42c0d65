"""The tiers of one rank, and the lanes that move KV between them and a paged cache.

What every engine needs, whether vLLM steps it or a program by hand: LMCache's engine, Redis and
peers behind it, the copier, what measures them, and the queue of jobs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lmcache_connector.copy_kv_blocks.copier import Fence, make_copier
from lmcache_connector.plans import (
    AuditJob,
    Fetched,
    ForwardTime,
    JobResult,
    LayerDifference,
    LoadJob,
    Outcome,
    PrefetchJob,
    PrefillWork,
    StoreJob,
    Tier,
)
from lmcache_connector.worker.job_queue import JobQueue
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
from lmcache_connector.worker.lmcache_plugs import JobTransfer, QueuedLoad
from lmcache_connector.worker.lmcache_start import EngineSettings
from lmcache_connector.worker.paged_part import PagedPart
from lmcache_connector.worker.redis_probe import NoProbe, RedisProbe
from lmcache_connector.worker.self_test import SelfTestError, run_self_test
from lmcache_connector.worker.waiting_jobs import Job, QueuedJob

if TYPE_CHECKING:
    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.storage.redis.tier import RedisTier

logger = logging.getLogger(__name__)

_FIRST_PROBE_SECONDS = 2.0
# After a forward pass on CPU, stores leave the cores to the sampling of its tokens for that long.
# New prompts of 3,000 tokens were answered 2 to 3 % sooner.
_STORE_DELAY_SECONDS = 0.03
_NUM_FETCH_LANES = 2


class RankTiers:
    """``parts`` are the rank's paged cache, to which the self-test writes, leaving it as it was.

    Both ``redis`` and ``peers`` are closed with the tiers. ``probe_keys`` name the chunks that
    measure Redis; without any, Redis is not measured. ``on_executed``: see :class:`JobQueue`.
    ``clock`` is monotonic, in seconds. Runs on the thread that steps the engine. Raises
    ``ConfigError`` or ``SelfTestError`` for what cannot be used.
    """

    def __init__(
        self,
        settings: EngineSettings,
        parts: Sequence[PagedPart],
        redis: RedisTier | None,
        peers: PeerTier | None = None,
        probe_keys: Sequence[bytes] = (),
        clock: Callable[[], float] = time.monotonic,
        on_executed: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self.redis, self.peers = redis, peers
        self._clock = clock
        self.copier = make_copier(parts[0].groups[0].device)
        self.timer = ForwardTimer(self.copier.fence, clock)
        self.hold_writes: Callable[[float], None] = lambda until: None
        """No writes to Redis before that reading of the clock, where the cores that write compute
        the model."""
        if redis is not None and self.copier.shares_cores:
            self.hold_writes = redis.hold_writes
        self.engine = LMCacheEngineAdapter(settings, parts, self.copier, redis, peers)
        self.probe: RedisProbe | NoProbe = NoProbe()
        if redis is not None and probe_keys:
            self.probe = RedisProbe(redis, probe_keys, clock)
        try:
            self.self_test = run_self_test(self.engine, parts, clock)
        except SelfTestError:
            self.engine.close(0.0)
            raise
        self._probe_until = clock() + _FIRST_PROBE_SECONDS
        self.jobs = JobQueue(
            self._run,
            _NUM_FETCH_LANES if redis is not None or peers is not None else 0,
            clock,
            _STORE_DELAY_SECONDS if self.copier.shares_cores else 0.0,
            on_executed,
            self.engine.offer_due,
        )

    @property
    def is_calibrating(self) -> bool:
        """Whether Redis is being measured for the first time, which takes 2 s at most."""
        return self.probe.is_busy and self._clock() < self._probe_until

    def measured(self) -> tuple[Fetched, ...]:
        """What was loaded at start to measure the tiers, to be asked for once."""
        found = self.probe.first(_FIRST_PROBE_SECONDS)
        if (test := self.self_test) is not None:
            found = (Fetched(Tier.CPU, test.num_bytes, test.load_seconds), *found)
        return found

    def stop(self, seconds: float) -> bool:
        """End what runs; each kind of it gets ``seconds``. False if some was left behind, which may
        still use the tier's memory."""
        self.probe.close(seconds)
        are_ended = self.jobs.close(seconds)
        if not are_ended:
            logger.warning("A KV transfer did not stop within %.1f s; leaving it behind", seconds)
        if self.peers is not None and not self.peers.close(seconds):
            logger.warning("A read from a peer did not stop within %.1f s", seconds)
            are_ended = False
        return are_ended

    def close(self, seconds: float, *, unmap: bool) -> None:
        """After :meth:`stop`: queued writes to Redis get ``seconds``, then all memory goes, but
        without ``unmap`` that of the CPU tier."""
        self.engine.close(seconds, unmap=unmap)
        self.copier.close()

    def load_in_step(self, job: LoadJob) -> LoadInStep:
        """Make a load on the calling thread, or queue it on the device in front of the next forward
        pass. Raises ``RuntimeError`` if a chunk is not there, and what the copy raises."""
        started = self._clock()
        return LoadInStep(job, self.engine.load_in_step(job), started, self._clock())

    def _run(self, queued: QueuedJob) -> JobResult:
        """On a lane's thread."""
        job, context, cancelled = queued.job, queued.context, queued.cancelled
        started, differences = self._clock(), tuple[LayerDifference, ...]()
        if not context.may_begin():
            return JobResult(job.job_id, Outcome.CANCELLED, 0, 0, 0.0)
        if isinstance(job, AuditJob):
            audit = self.engine.compare(
                job,
                queued.fence,
                cancelled,
                queued.deadline,
                context.gate,
                partial(self.jobs.has_read, queued),
            )
            moved, differences = JobTransfer.of([audit]), audit.differences
        elif isinstance(job, PrefetchJob):
            # What it has waited behind loads says nothing of a tier, which would look stalled.
            moved = self.engine.fetch(job, cancelled, started + job.deadline_seconds)
        elif isinstance(job, StoreJob):
            moved = self.engine.store(job, queued.fence, cancelled, context.gate, context.parts)
        else:
            moved = self.engine.load(job, queued.fence, cancelled, queued.deadline, context.parts)
        if moved.num_chunks == moved.num_keys:
            outcome = Outcome.DONE
        elif cancelled.is_set():
            outcome = Outcome.CANCELLED
        else:
            is_late = self._clock() >= queued.deadline
            outcome = Outcome.DEADLINE if is_late else Outcome.MISSING
        return JobResult(
            job_id=job.job_id,
            outcome=outcome,
            num_chunks=moved.num_chunks,
            num_bytes=0 if isinstance(job, AuditJob) else moved.num_bytes,
            seconds=self._clock() - started,
            fetched=moved.fetched,
            differences=differences,
        )


@dataclass(frozen=True, slots=True)
class LoadInStep:
    """A load that a forward pass reads: made, or queued, from ``started`` to ``ended``."""

    job: LoadJob
    load: QueuedLoad
    started: float
    ended: float

    def take_result(self) -> QueuedJob | None:
        """``None``: the device has not come to its end. Else what it was copied from is let go."""
        copies = self.load.copies
        if not all(copy.is_done for copy in copies):
            return None
        self.load.release()
        seconds = sum(copy.seconds for copy in copies)
        seconds = seconds or self.ended - self.started  # the host was ahead of the device
        num_chunks, num_bytes = len(self.job.keys), sum(copy.num_bytes for copy in copies)
        result = JobResult(self.job.job_id, Outcome.DONE, num_chunks, num_bytes, seconds)
        return QueuedJob(self.job, None, self.started, self.started, self.started, result=result)


@dataclass(frozen=True, slots=True)
class _Queued:
    """A forward pass that was queued on a device between two fences."""

    work: PrefillWork
    before: Fence
    after: Fence


class ForwardTimer:
    """Times forward passes on the device that runs them.

    On CPU a forward pass runs between two calls, and a clock measures it. On CUDA those calls only
    queue it: two fences in the compute stream, before and after it, measure it once it is done.
    Runs on the engine's step thread; ``clock`` is in seconds.

    ``fence()`` marks a point in the device's work: see :meth:`Copier.fence`. ``has_news``: whether
    a timed pass is done, or queued; a plain attribute, cheap to poll every step.
    """

    def __init__(self, fence: Callable[[], Fence | None], clock: Callable[[], float]) -> None:
        self._fence = fence
        self._clock = clock
        self._work: PrefillWork | None = None
        self._before: Fence | None = None
        self._started = 0.0
        self._queued: deque[_Queued] = deque()
        self._done: list[ForwardTime] = []
        self.has_news = False

    def start(self, work: PrefillWork | None) -> None:
        """Call right before the forward pass; ``None``: it is not worth timing."""
        self._work = work
        if work is not None:
            self._before, self._started = self._fence(), self._clock()

    def stop(self) -> None:
        """Call right after it was run or, on CUDA, queued."""
        work, self._work = self._work, None
        if work is None:
            return
        self.has_news = True
        before, after = self._before, self._fence()
        if before is not None and after is not None:
            self._queued.append(_Queued(work, before, after))
        else:
            self._done.append(ForwardTime(work, self._clock() - self._started))

    def take(self) -> tuple[ForwardTime, ...]:
        """The passes done since the last call. Never waits."""
        while self._queued and self._queued[0].after.query():
            queued = self._queued.popleft()
            milliseconds = queued.before.elapsed_time(queued.after)
            self._done.append(ForwardTime(queued.work, milliseconds / 1000))
        done, self._done = self._done, []
        self.has_news = bool(self._queued)
        return tuple(done)
