"""Counts what one rank does for ``/metrics``: jobs as they end, and the state of its tiers.

A step in which nothing ended costs one look at the clock: the tiers are asked after a job has
ended, else once per second. Runs on the engine's step thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_connector.metrics.samples import Samples, Tally
from lmcache_connector.plans import (
    AuditJob,
    CacheEvent,
    JobResult,
    LoadJob,
    Outcome,
    PrefetchJob,
    StoreJob,
)
from lmcache_connector.retention.queues import Holdings
from lmcache_connector.storage.redis.counters import TierCounts, WriteEnd

if TYPE_CHECKING:
    from lmcache_connector.storage.redis.tier import RedisTierStats

_REFRESH_SECONDS = 1.0
_AT_ONCE = float("-inf")
_DROPPED = (WriteEnd.QUEUE_FULL, WriteEnd.FAILED)


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """One rank at one moment.

    ``redis``: ``None`` without a Redis tier; ``peers``: what was read from them since the start, of
    which ``mapped_chunks`` came out of their memory, and ``peer_fallbacks`` reads did not.
    ``redis_writes``: bytes and seconds of each burst written to Redis since the last snapshot.
    """

    queued_jobs: int
    cpu_used_bytes: int
    cpu_capacity_bytes: int
    redis: RedisTierStats | None
    redis_writes: Sequence[tuple[int, float]] = ()
    holdings: Holdings = field(default_factory=Holdings)
    peers: TierCounts = field(default_factory=TierCounts)
    mapped_chunks: int = 0
    peer_fallbacks: int = 0
    refused_chunks: int = 0


class WorkerMetrics:
    """``take_snapshot()`` reads the rank's state; ``clock`` is monotonic, in seconds."""

    def __init__(
        self, rank: int, take_snapshot: Callable[[], RankSnapshot], clock: Callable[[], float]
    ) -> None:
        self._rank = str(rank)
        self._take_snapshot = take_snapshot
        self._clock = clock
        self.tally = Tally()
        self._last_counts = self._last_peers = TierCounts()
        self._last_holdings = Holdings()
        self._last = RankSnapshot(0, 0, 0, None)
        self._next_snapshot = _AT_ONCE

    def job_ended(self, job: LoadJob | StoreJob | PrefetchJob, result: JobResult) -> None:
        if isinstance(job, LoadJob):
            self._load_ended(result)
        elif isinstance(job, PrefetchJob):
            self.tally.count("prefetched_bytes", amount=result.fetched_bytes)
            self._count_fetched(result)
        elif not isinstance(job, AuditJob):  # the scheduler side counts those
            self._store_ended(result)
        self._next_snapshot = _AT_ONCE

    def cache_changed(self, events: Iterable[CacheEvent]) -> None:
        evicted = sum(not event.admitted for event in events)
        self.tally.count("evicted_chunks", "cpu", amount=evicted)
        self._next_snapshot = _AT_ONCE

    def take(self) -> Samples | None:
        """What is new since the last call; ``None`` if nothing is, or it can wait."""
        now = self._clock()
        if now < self._next_snapshot:
            return None
        self._next_snapshot = now + _REFRESH_SECONDS
        self._count_snapshot(self._take_snapshot())
        return self.tally.take()

    def _load_ended(self, result: JobResult) -> None:
        if result.outcome is not Outcome.DONE:
            self.tally.count("failed_loads", result.outcome.value)
        copy_seconds = max(0.0, result.seconds - result.fetch_seconds)
        self.tally.count("loaded_bytes", "cpu", amount=result.num_bytes)
        self._observe("load", "cpu", result.num_bytes, copy_seconds)
        self._count_fetched(result)

    def _count_fetched(self, result: JobResult) -> None:
        for fetched in result.fetched:
            tier = fetched.tier.value
            self.tally.count("loaded_bytes", tier, amount=fetched.num_bytes)
            self._observe("load", tier, fetched.num_bytes, fetched.seconds)

    def _store_ended(self, result: JobResult) -> None:
        if result.outcome is not Outcome.DONE:
            self.tally.count("failed_stores", result.outcome.value)
        self.tally.count("stored_bytes", "cpu", amount=result.num_bytes)
        self._observe("store", "cpu", result.num_bytes, result.seconds)

    def _observe(self, verb: str, tier: str, num_bytes: int, seconds: float) -> None:
        """How long a transfer took, and how fast it was; nothing for one that moved nothing."""
        if num_bytes > 0 and seconds > 0:
            self.tally.observe(f"{verb}_seconds", tier, value=seconds)
            self.tally.observe(f"{verb}_bytes_per_second", tier, value=num_bytes / seconds)

    def _count_snapshot(self, snapshot: RankSnapshot) -> None:
        self.tally.set("queued_jobs", self._rank, value=snapshot.queued_jobs)
        self.tally.set("cpu_used_bytes", self._rank, value=snapshot.cpu_used_bytes)
        self.tally.set("cpu_capacity_bytes", self._rank, value=snapshot.cpu_capacity_bytes)
        self._count_holdings(snapshot.holdings)
        for num_bytes, seconds in snapshot.redis_writes:
            self._observe("store", "redis", num_bytes, seconds)
        if snapshot.redis is not None:
            self._count_tier(snapshot.redis)
        for result, amount in _chunks_since(self._last_peers, snapshot.peers):
            self.tally.count("peer_chunks", result, amount=amount)
        self._last_peers = snapshot.peers
        last, self._last = self._last, snapshot
        tally = self.tally
        tally.count("p2p_refused_chunks", amount=snapshot.refused_chunks - last.refused_chunks)
        tally.count("peer_mapped_chunks", amount=snapshot.mapped_chunks - last.mapped_chunks)
        tally.count("peer_fallbacks", amount=snapshot.peer_fallbacks - last.peer_fallbacks)

    def _count_holdings(self, now: Holdings) -> None:
        tally, last = self.tally, self._last_holdings
        before = dict(last.evicted)
        for label, num_bytes in now.tenant_bytes:
            tally.set("cpu_tenant_bytes", self._rank, label, value=num_bytes)
        tally.set("cpu_pinned_bytes", self._rank, value=now.pinned_bytes)
        tally.count("refused_pins", amount=now.refused_pins - last.refused_pins)
        for reason, count in now.evicted:
            tally.count("cpu_evictions", reason, amount=count - before.get(reason, 0))
        self._last_holdings = now

    def _count_tier(self, tier: RedisTierStats) -> None:
        tally, counts, last = self.tally, tier.counts, self._last_counts
        tally.set("write_queue_bytes", self._rank, value=tier.queued_bytes)
        tally.set("writes_paused", self._rank, value=float(tier.writes_paused))
        for node, state in tier.servers:
            tally.set("circuit_state", self._rank, node, value=state.value)
        for result, amount in _chunks_since(last, counts):
            tally.count("redis_chunks", result, amount=amount)
        for end, count in counts.writes.items():
            new = count - last.writes.get(end, 0)
            if end in _DROPPED:
                tally.count("dropped_writes", end.value, amount=new)
            else:
                tally.count("written_chunks", end.value, amount=new)
        tally.count("stored_bytes", "redis", amount=counts.bytes_written - last.bytes_written)
        self._last_counts = counts


def _chunks_since(last: TierCounts, now: TierCounts) -> Iterator[tuple[str, int]]:
    """Chunks read since then, and those that were not, by cause."""
    yield "hit", now.chunks_hit - last.chunks_hit
    for reason, count in now.misses.items():
        yield reason, count - last.misses.get(reason, 0)
