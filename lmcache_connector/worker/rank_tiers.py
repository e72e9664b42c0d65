"""The tiers of one rank, and the lanes that move KV between the tiers and a paged cache.

Shared by vLLM's engines and engines stepped by hand: LMCache's engine, Redis and peers, the copier,
the measurements, and the job queue.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

from lmcache_connector.copy_kv_blocks.copier import Fence, make_copier
from lmcache_connector.plans import (
    AuditJob,
    Fetched,
    ForwardTime,
    JobResult,
    Outcome,
    PrefillWork,
    StoreJob,
    Tier,
)
from lmcache_connector.worker.job_queue import Job, JobQueue, QueuedJob
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
from lmcache_connector.worker.lmcache_start import RankSettings
from lmcache_connector.worker.paged_part import PagedPart
from lmcache_connector.worker.redis_probe import RedisProbe
from lmcache_connector.worker.self_test import run_self_test

if TYPE_CHECKING:
    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.storage.redis.tier import RedisTier

logger = logging.getLogger(__name__)

_FIRST_PROBE_SECONDS = 2.0
# Stores wait this long after their forward pass was submitted: else they would compete with the
# sampling of its tokens, for cores on a CPU, for the interpreter lock everywhere. Measured on a
# CPU: with the delay, new prompts of 3,000 tokens were answered 2 to 3 % sooner. On an H200,
# without the delay, they were answered 2 to 7 ms later than without the connector.
_STORE_DELAY_SECONDS = 0.03
_NUM_FETCH_LANES = 2


class RankTiers:
    """``parts``: the rank's paged cache; the self-test writes to it and restores it.

    :meth:`stop` closes ``peers``, :meth:`close` ``redis``. ``on_executed``: see :class:`JobQueue`.
    ``clock`` is monotonic, in seconds. Runs on the thread that steps the engine. Raises
    ``ConfigError`` or ``SelfTestError``.
    """

    def __init__(
        self,
        settings: RankSettings,
        parts: Sequence[PagedPart],
        redis: RedisTier | None,
        peers: PeerTier | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_executed: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self.redis, self.peers = redis, peers
        self._clock = clock
        self.copier = make_copier(parts[0].groups[0].device)
        self.timer = ForwardTimer(self.copier.fence, clock)
        self.engine = LMCacheEngineAdapter(settings, parts, self.copier, redis, peers)
        try:
            self.self_test = run_self_test(self.engine, parts, clock, in_step=settings.announces)
        except BaseException:
            self.engine.close(0.0)
            raise
        self.probe = RedisProbe(redis, settings.probe_keys, clock)
        self._probe_until = clock() + _FIRST_PROBE_SECONDS
        writes = self.engine.writes
        self.jobs = JobQueue(
            self._run,
            _NUM_FETCH_LANES if redis is not None or peers is not None else 0,
            clock,
            _STORE_DELAY_SECONDS,
            on_executed,
            writes.offer_due if writes is not None else None,
        )

    @property
    def is_calibrating(self) -> bool:
        """Whether the first measurement of Redis is under way; 2 s at most."""
        return self.probe.is_busy and self._clock() < self._probe_until

    @cached_property
    def measured(self) -> tuple[Fetched, ...]:
        """The measurements at start."""
        found = self.probe.first(_FIRST_PROBE_SECONDS)
        if (test := self.self_test) is not None:
            found = (Fetched(Tier.CPU, test.num_bytes, test.load_seconds), *found)
        return found

    def stop(self, seconds: float) -> bool:
        """End all activity; each kind gets ``seconds``. False if something was left behind that may
        still use the tier's memory."""
        self.probe.close(seconds)
        are_ended = self.jobs.close(seconds)
        if not are_ended:
            logger.warning("A load or store did not stop within %.1f s: left behind", seconds)
        if self.peers is not None and not self.peers.close(seconds):
            logger.warning("A read from a peer did not stop within %.1f s", seconds)
            are_ended = False
        return are_ended

    def close(self, seconds: float, *, unmap: bool) -> None:
        """After :meth:`stop`: give queued writes to Redis ``seconds``, then free all memory that
        nothing left behind may use: ``unmap`` is :meth:`stop`'s answer."""
        self.engine.close(seconds, unmap=unmap)
        if unmap:
            self.copier.close()

    def _run(self, queued: QueuedJob) -> JobResult:
        """Runs on a lane's thread."""
        job, started = queued.job, self._clock()
        if isinstance(job, AuditJob):
            runs = [self.engine.compare(job, queued, partial(self.jobs.has_read, queued))]
        elif isinstance(job, StoreJob):
            runs = self.engine.store(job, queued)
        else:
            runs = self.engine.load(job, queued)
        num_chunks = sum(each.num_chunks for each in runs)
        if num_chunks == sum(len(each.run.keys) for each in runs):
            outcome = Outcome.DONE
        elif queued.cancelled.is_set():
            outcome = Outcome.CANCELLED
        else:
            is_late = self._clock() >= queued.deadline
            outcome = Outcome.DEADLINE if is_late else Outcome.MISSING
        return JobResult(
            job_id=job.job_id,
            outcome=outcome,
            num_chunks=num_chunks,
            num_bytes=sum(each.num_bytes for each in runs if not isinstance(job, AuditJob)),
            seconds=self._clock() - started,
            fetched=tuple(by_tier([fetched for each in runs for fetched in each.fetched])),
            copy_seconds=sum(each.copy_seconds for each in runs),
            differences=tuple(found for each in runs for found in each.differences),
        )


def by_tier(fetches: Sequence[Fetched]) -> Iterator[Fetched]:
    """One sum per tier, in the order in which the tiers were read."""
    for tier in dict.fromkeys(each.tier for each in fetches):
        found = [each for each in fetches if each.tier is tier]
        yield Fetched(
            tier,
            sum(each.num_bytes for each in found),
            sum(each.seconds for each in found),
            any(each.has_failed for each in found),
            found[-1].lacks_next,
        )


class ForwardTimer:
    """Times forward passes on the device that runs them.

    On CPU, a forward pass runs between two calls, timed by ``clock`` (seconds). On CUDA the calls
    only queue the pass: fences before and after it in the compute stream time it once it is done.
    Runs on the engine's step thread.

    ``fence()``: see :meth:`Copier.fence`. ``has_updates``: whether a timed pass is done or queued;
    a plain attribute, cheap to poll every step.
    """

    def __init__(self, fence: Callable[[], Fence | None], clock: Callable[[], float]) -> None:
        self._fence = fence
        self._clock = clock
        self._work: PrefillWork | None = None
        self._before: Fence | None = None
        self._started = 0.0
        self._queued: deque[tuple[PrefillWork, Fence, Fence]] = deque()  # with fences around them
        self._done: list[ForwardTime] = []
        self.has_updates = False

    def start(self, work: PrefillWork | None) -> None:
        """Call right before the forward pass; ``None``: do not time it."""
        self._work = work
        if work is not None:
            self._before, self._started = self._fence(), self._clock()

    def stop(self) -> None:
        """Call right after the pass was run or, on CUDA, queued."""
        work, self._work = self._work, None
        if work is None:
            return
        self.has_updates = True
        before, after = self._before, self._fence()
        if before is not None and after is not None:
            self._queued.append((work, before, after))
        else:
            self._done.append(ForwardTime(work, self._clock() - self._started))

    def take(self) -> tuple[ForwardTime, ...]:
        """Passes done since the last call. Never waits."""
        while self._queued and self._queued[0][2].query():
            work, before, after = self._queued.popleft()
            self._done.append(ForwardTime(work, before.elapsed_time(after) / 1000))
        done, self._done = self._done, []
        self.has_updates = bool(self._queued)
        return tuple(done)
