"""Totals of the scheduler side."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_connector.plans import JobResult, LoadJob, Outcome, StoreJob


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start. ``hit_tokens`` count what was planned, ``failed`` what was redone."""

    # Questions to Redis; requests the index of the CPU tier was asked about, and those found.
    redis_lookups: int = 0
    cpu_lookups: int = 0
    cpu_lookup_hits: int = 0
    redis_lookup_hits: int = 0
    queried_tokens: int = 0
    cpu_hit_tokens: int = 0
    redis_hit_tokens: int = 0
    load_jobs: int = 0
    store_jobs: int = 0
    # Of whole loads, over all ranks: loads from memory, and loads that fetched from Redis.
    cpu_load_bytes: int = 0
    cpu_load_seconds: float = 0.0
    redis_load_bytes: int = 0
    redis_load_seconds: float = 0.0
    failed_loads: dict[str, int] = field(default_factory=dict)
    recomputed_tokens: int = 0
    # Loaded instead of computed, and what computing them would have taken.
    saved_tokens: int = 0
    saved_seconds: float = 0.0
    # What was decided about hits, by reason; the tokens of hits that were left to compute.
    decisions: dict[str, int] = field(default_factory=dict)
    declined_tokens: int = 0
    # Requests that did not wait for Redis to say what it holds, or not to the end.
    lookups_given_up: int = 0
    probes: int = 0

    def count_hit(self, num_tokens: int, redis_tokens: int) -> None:
        """A load was planned; ``redis_tokens`` of its tokens come from Redis."""
        self.redis_hit_tokens += redis_tokens
        self.cpu_hit_tokens += num_tokens - redis_tokens

    def count_job(self, job: LoadJob | StoreJob) -> None:
        if isinstance(job, LoadJob):
            self.load_jobs += 1
        else:
            self.store_jobs += 1

    def count_load(self, job: LoadJob, result: JobResult) -> None:
        """How it ended on one rank."""
        if result.outcome is not Outcome.DONE:
            reason = result.outcome.value
            self.failed_loads[reason] = self.failed_loads.get(reason, 0) + 1
        elif job.needs_redis:
            self.redis_load_bytes += result.num_bytes
            self.redis_load_seconds += result.seconds
        else:
            self.cpu_load_bytes += result.num_bytes
            self.cpu_load_seconds += result.seconds

    def count_decision(self, reason: str, declined_tokens: int) -> None:
        """About one request's hit, of which ``declined_tokens`` are left to compute."""
        self.decisions[reason] = self.decisions.get(reason, 0) + 1
        self.declined_tokens += declined_tokens
