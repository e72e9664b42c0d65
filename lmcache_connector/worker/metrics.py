"""Counts one rank's work for ``/metrics``: ended jobs, and the state of its tiers.

The tiers are read after a job has ended, else once per second; another step costs one reading of
the clock. Runs on the engine's step thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.metrics.samples import Samples, Tally
from lmcache_connector.plans import (
    AuditJob,
    JobResult,
    LoadJob,
    Outcome,
    StoreJob,
)
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.counters import TierCounts, WriteEnd

if TYPE_CHECKING:
    from lmcache_connector.peers.transfers import Transfers
    from lmcache_connector.storage.redis.tier import RedisTier
    from lmcache_connector.worker.rank_tiers import RankTiers

_REFRESH_SECONDS = 1.0
_AT_ONCE = float("-inf")
_DROPPED = (WriteEnd.QUEUE_FULL, WriteEnd.FAILED)


@dataclass(eq=False)
class WorkerMetrics:
    """Metrics of one rank. ``clock`` is monotonic, in seconds."""

    rank: int
    tiers: RankTiers
    transfers: Transfers
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._rank = str(self.rank)
        self.tally = Tally()
        self._next_look = _AT_ONCE
        self._circuits: dict[str, CircuitState] = {}  # as reported

    def job_ended(self, job: LoadJob | StoreJob, result: JobResult) -> None:
        self._next_look = _AT_ONCE
        # The scheduler side counts an audit's outcome; its fetched bytes count here.
        is_audit = isinstance(job, AuditJob)
        is_load = is_audit or isinstance(job, LoadJob)
        verb, counter = ("load", "loaded_bytes") if is_load else ("store", "stored_bytes")
        if result.outcome is not Outcome.DONE and not is_audit:
            self.tally.count(f"failed_{verb}s", result.outcome.value)
        seconds = result.copy_seconds if is_load else result.seconds
        moved = [("cpu", result.num_bytes, seconds)]
        moved += [(each.tier.value, each.num_bytes, each.seconds) for each in result.fetched]
        for tier, num_bytes, seconds in moved:
            self.tally.count(counter, tier, amount=num_bytes)
            self._observe(verb, tier, num_bytes, seconds)

    def take(self) -> Samples | None:
        """New samples since the last call; ``None`` if there are none or they can wait."""
        now = self.clock()
        if now < self._next_look:
            return None
        self._next_look = now + _REFRESH_SECONDS
        self._sample()
        return self.tally.take()

    def _observe(self, verb: str, tier: str, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            self.tally.observe(f"{verb}_seconds", tier, value=seconds)
            self.tally.observe(f"{verb}_bytes_per_second", tier, value=num_bytes / seconds)

    def _sample(self) -> None:
        tally, rank, tiers = self.tally, self._rank, self.tiers
        cpu, peers = tiers.engine.cpu, tiers.peers
        held = cpu.ledger.holdings()
        tally.set("queued_jobs", rank, value=tiers.jobs.num_open)
        tally.set("cpu_used_bytes", rank, value=cpu.used_bytes)
        tally.set("cpu_capacity_bytes", rank, value=int(cpu.capacity_bytes))
        for label, num_bytes in held.tenant_bytes:
            tally.set("cpu_tenant_bytes", rank, label, value=num_bytes)
        tally.set("cpu_pinned_bytes", rank, value=held.pinned_bytes)
        tally.count_up_to("refused_pins", total=held.refused_pins)
        for reason, count in held.evicted:
            tally.count_up_to("cpu_evictions", reason, total=count)
        tally.count_up_to("p2p_refused_chunks", total=self.transfers.num_refused)
        if tiers.redis is not None:
            self._sample_redis(tiers.redis)
        if peers is not None:
            self._count_chunks("peer", peers.counts())
            tally.count_up_to("peer_mapped_chunks", total=peers.num_mapped)
            tally.count_up_to("peer_fallbacks", total=peers.num_fallbacks)

    def _sample_redis(self, redis: RedisTier) -> None:
        tally, stats = self.tally, redis.stats()
        for num_bytes, seconds in redis.take_write_times():
            self._observe("store", "redis", num_bytes, seconds)
        tally.set("write_queue_bytes", self._rank, value=stats.queued_bytes)
        tally.set("writes_paused", self._rank, value=float(stats.writes_paused))
        gone = dict.fromkeys(self._circuits, CircuitState.CLOSED)  # else their last state remains
        self._circuits = dict(stats.servers)
        for node, state in {**gone, **self._circuits}.items():
            tally.set("circuit_state", self._rank, node, value=state.value)
        self._count_chunks("redis", stats.counts)
        for end, count in stats.counts.writes.items():
            if end in _DROPPED:
                tally.count_up_to("dropped_writes", end.value, total=count)
            else:
                tally.count_up_to("written_chunks", end.value, total=count)
        tally.count_up_to("stored_bytes", "redis", total=stats.counts.bytes_written)

    def _count_chunks(self, tier: str, counts: TierCounts) -> None:
        self.tally.count_up_to(f"{tier}_chunks", "hit", total=counts.chunks_hit)
        for reason, count in counts.misses.items():
            self.tally.count_up_to(f"{tier}_chunks", reason, total=count)
