"""Totals of the scheduler side."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start. ``hit_tokens`` count what was planned, ``failed`` what was redone."""

    # Questions to Redis; requests the index of the CPU tier was asked about, and those found.
    lookups: int = 0
    local_lookups: int = 0
    local_lookup_hits: int = 0
    remote_lookup_hits: int = 0
    queried_tokens: int = 0
    local_hit_tokens: int = 0
    remote_hit_tokens: int = 0
    load_jobs: int = 0
    store_jobs: int = 0
    # Of whole loads, over all ranks: loads from memory, and loads that fetched from Redis.
    local_load_bytes: int = 0
    local_load_seconds: float = 0.0
    remote_load_bytes: int = 0
    remote_load_seconds: float = 0.0
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
