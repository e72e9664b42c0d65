"""Every metric of the connector on vLLM's ``/metrics``: names, labels, meaning.

Names and units follow Prometheus and vLLM: base units, ``_total`` for what only grows (the client
library appends it), and vLLM's own labels ``model_name`` and ``engine`` before those listed here.
``tier`` is ``cpu`` or ``redis``. ``rank`` is a worker's world rank, ``scheduler`` for the process
that looks chunks up. A metric whose unit is bytes or jobs counts over all ranks of an engine; one
in tokens or requests is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

PREFIX = "vllm:lmcache_"

SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
BANDWIDTH_BUCKETS = (1e7, 3e7, 1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2e10, 5e10, 1e11)


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """``buckets``: upper bounds, of a histogram."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    documentation: str
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As registered. A counter appears with ``_total`` behind it."""
        return PREFIX + self.name


def _counter(name: str, labels: tuple[str, ...], documentation: str) -> Metric:
    return Metric(name, Kind.COUNTER, labels, documentation)


def _gauge(name: str, labels: tuple[str, ...], documentation: str) -> Metric:
    return Metric(name, Kind.GAUGE, labels, documentation)


def _histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, ("tier",), documentation, buckets)


def _table(metrics: Iterable[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS = _table(
    [
        _counter("lookups", ("tier",), "Requests for which a tier was asked what it holds."),
        _counter("lookup_hits", ("tier",), "Requests of which a tier had at least one chunk."),
        _counter(
            "lookups_given_up", (), "Requests that did not wait for Redis to say what it holds."
        ),
        _counter("queried_tokens", (), "Prompt tokens looked up that vLLM itself did not have."),
        _counter("hit_tokens", ("tier",), "Tokens planned to be loaded from a tier."),
        _counter("declined_tokens", (), "Hit tokens left to compute because that is quicker."),
        _counter("decisions", ("reason",), "Compute-or-load decisions on hits, by reason."),
        _counter("probes", (), "Measurements of Redis' speed without a request."),
        _counter("load_jobs", (), "Loads planned."),
        _counter("store_jobs", (), "Stores planned."),
        _counter("failed_loads", ("reason",), "Loads that did not bring all, over all ranks."),
        _counter("failed_stores", ("reason",), "Stores that did not keep all, over all ranks."),
        _counter("recomputed_tokens", (), "Tokens whose load failed, computed after all."),
        _counter("prefill_saved_tokens", (), "Prompt tokens loaded instead of computed."),
        _counter(
            "prefill_saved_seconds",
            (),
            "Estimated compute time of those tokens; load time is not taken off.",
        ),
        _counter("loaded_bytes", ("tier",), "cpu: copied to KV caches. redis: fetched."),
        _counter("stored_bytes", ("tier",), "cpu: copied from KV caches. redis: written."),
        _counter("evicted_chunks", ("tier",), "Chunks that left the CPU tier."),
        _counter(
            "written_chunks",
            ("result",),
            "Ends of writes to Redis: written, already_there, claimed_elsewhere.",
        ),
        _counter(
            "dropped_writes",
            ("reason",),
            "Chunks not written to Redis: queue_full (or writes paused), failed.",
        ),
        _counter(
            "redis_chunks",
            ("result",),
            "Chunks asked of Redis by loads: hit, or why not (missing, deadline, bad_checksum...).",
        ),
        _histogram("lookup_seconds", "Time until a tier said what it holds.", SECONDS_BUCKETS),
        _histogram("load_seconds", "Time of a load job in a tier, per rank.", SECONDS_BUCKETS),
        _histogram("store_seconds", "Time of a store job or burst, per rank.", SECONDS_BUCKETS),
        _histogram(
            "load_bytes_per_second", "Bandwidth of a load job in a tier.", BANDWIDTH_BUCKETS
        ),
        _histogram(
            "store_bytes_per_second", "Bandwidth of a store job or burst.", BANDWIDTH_BUCKETS
        ),
        _gauge("queued_jobs", ("rank",), "Load and store jobs not yet ended."),
        _gauge("write_queue_bytes", ("rank",), "Bytes waiting to be written to Redis."),
        _gauge("cpu_used_bytes", ("rank",), "Bytes of chunks in the CPU tier."),
        _gauge("cpu_capacity_bytes", ("rank",), "Size of the CPU tier."),
        _gauge(
            "circuit_state",
            ("rank", "node"),
            "Circuit breaker of a server: 0 closed (in use), 1 on trial, 2 open (left alone).",
        ),
        _gauge("writes_paused", ("rank",), "1 while Redis refuses writes."),
    ]
)
