"""What one rank tells ``/metrics``: jobs as they end, and the tiers' own counts now and then.

A step in which nothing ended costs one look at the clock: the tiers are asked when a job has ended,
else once per second. Runs on the engine's step thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.metrics.samples import Samples
from lmcache_connector.plans import CacheEvent, JobResult, LoadJob, Outcome, StoreJob
from lmcache_connector.storage.redis.counters import TierCounts, WriteEnd

if TYPE_CHECKING:
    from lmcache_connector.storage.redis.tier import RedisTierStats

_REFRESH_SECONDS = 1.0
_DROPPED = (WriteEnd.QUEUE_FULL, WriteEnd.FAILED)


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank at one moment. ``redis``: ``None`` without a Redis tier."""

    queued_jobs: int
    cpu_used_bytes: int
    cpu_capacity_bytes: int
    redis: RedisTierStats | None
    # Bursts written to Redis since the last look: bytes, seconds.
    redis_writes: Sequence[tuple[int, float]] = ()


class WorkerMetrics:
    """``look()`` reads the rank's figures; it is called now and then."""

    def __init__(
        self, rank: int, look: Callable[[], RankFigures], clock: Callable[[], float]
    ) -> None:
        self._rank = str(rank)
        self._look = look
        self._clock = clock
        self._samples = Samples()
        self._last_counts = TierCounts()
        self._look_at = float("-inf")

    def job_ended(self, job: LoadJob | StoreJob, result: JobResult) -> None:
        if isinstance(job, LoadJob):
            self._load_ended(result)
        else:
            self._store_ended(result)
        self._look_at = float("-inf")

    def cache_changed(self, events: Iterable[CacheEvent]) -> None:
        evicted = sum(not event.admitted for event in events)
        self._samples.count("evicted_chunks", "cpu", amount=evicted)

    def take(self) -> Samples | None:
        """What is new since the last call; ``None`` if nothing is."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + _REFRESH_SECONDS
            self._take_figures(self._look())
        if self._samples.is_empty:
            return None
        taken, self._samples = self._samples, Samples()
        return taken

    def _load_ended(self, result: JobResult) -> None:
        if result.outcome is not Outcome.DONE:
            self._samples.count("failed_loads", result.outcome.value)
        copy_seconds = max(0.0, result.seconds - result.redis_seconds)
        self._moved("load", "loaded_bytes", "cpu", result.num_bytes, copy_seconds)
        self._moved("load", "loaded_bytes", "redis", result.redis_bytes, result.redis_seconds)

    def _store_ended(self, result: JobResult) -> None:
        if result.outcome is not Outcome.DONE:
            self._samples.count("failed_stores", result.outcome.value)
        self._moved("store", "stored_bytes", "cpu", result.num_bytes, result.seconds)

    def _moved(
        self, verb: str, counter: str | None, tier: str, num_bytes: int, seconds: float
    ) -> None:
        if num_bytes <= 0:
            return
        if counter is not None:
            self._samples.count(counter, tier, amount=num_bytes)
        if seconds > 0:
            self._samples.observe(f"{verb}_seconds", tier, value=seconds)
            self._samples.observe(f"{verb}_bytes_per_second", tier, value=num_bytes / seconds)

    def _take_figures(self, figures: RankFigures) -> None:
        samples, rank = self._samples, self._rank
        samples.set("queued_jobs", rank, value=figures.queued_jobs)
        samples.set("cpu_used_bytes", rank, value=figures.cpu_used_bytes)
        samples.set("cpu_capacity_bytes", rank, value=figures.cpu_capacity_bytes)
        for num_bytes, seconds in figures.redis_writes:
            self._moved("store", None, "redis", num_bytes, seconds)
        if figures.redis is not None:
            self._take_tier(figures.redis)

    def _take_tier(self, tier: RedisTierStats) -> None:
        samples, counts, last = self._samples, tier.counts, self._last_counts
        samples.set("write_queue_bytes", self._rank, value=tier.queued_bytes)
        samples.set("writes_paused", self._rank, value=float(tier.writes_paused))
        for node, state in tier.servers:
            samples.set("circuit_state", self._rank, node, value=state.value)
        samples.count("redis_chunks", "hit", amount=counts.chunks_hit - last.chunks_hit)
        for reason, count in counts.misses.items():
            samples.count("redis_chunks", reason, amount=count - last.misses.get(reason, 0))
        for end, count in counts.writes.items():
            metric = "dropped_writes" if end in _DROPPED else "written_chunks"
            samples.count(metric, end.value, amount=count - last.writes.get(end, 0))
        samples.count("stored_bytes", "redis", amount=counts.bytes_written - last.bytes_written)
        self._last_counts = counts
