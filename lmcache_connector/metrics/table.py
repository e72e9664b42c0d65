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

Known = tuple[tuple[str, ...], ...]
_TIERS: Known = (("cpu",), ("redis",))
_BYPASSES: Known = tuple(
    (reason,)
    for reason in (
        *("no_salt", "pooling", "session", "adapter"),
        *("multimodal", "embeddings", "unknown_field"),
    )
)


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """``known``: label values known beforehand, so that a rate has a first value to start from.
    ``buckets``: upper bounds, of a histogram."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    documentation: str
    known: Known
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As registered. A counter appears with ``_total`` behind it."""
        return PREFIX + self.name


def counter(
    name: str, labels: tuple[str, ...], documentation: str, known: Known | None = None
) -> Metric:
    return Metric(name, Kind.COUNTER, labels, documentation, _known(labels, known))


def gauge(name: str, labels: tuple[str, ...], documentation: str) -> Metric:
    return Metric(name, Kind.GAUGE, labels, documentation, _known(labels, None))


def histogram(
    name: str, labels: tuple[str, ...], documentation: str, buckets: tuple[float, ...]
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, labels, documentation, _known(labels, None), buckets)


def _known(labels: tuple[str, ...], given: Known | None) -> Known:
    if given is not None or not labels:
        return given or ((),)
    return _TIERS if labels == ("tier",) else ()


def table(metrics: Iterable[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS = table(
    [
        counter(
            "bypassed_requests",
            ("reason",),
            "Requests that pass the tiers by: no_salt, pooling, session, adapter, multimodal, "
            "embeddings, unknown_field.",
            _BYPASSES,
        ),
        counter("lookups", ("tier",), "Requests for which a tier was asked what it holds."),
        counter("scheduler_failures", (), "Exceptions that ended in lost hits, in the scheduler."),
        counter("lookup_hits", ("tier",), "Requests of which a tier had at least one chunk."),
        counter(
            "lookups_given_up", (), "Requests that did not wait for Redis to say what it holds."
        ),
        counter("queried_tokens", (), "Prompt tokens looked up that vLLM itself did not have."),
        counter("hit_tokens", ("tier",), "Tokens planned to be loaded from a tier."),
        counter("declined_tokens", (), "Hit tokens left to compute because that is quicker."),
        counter("decisions", ("reason",), "Compute-or-load decisions on hits, by reason."),
        counter("probes", (), "Measurements of Redis' speed without a request."),
        counter("load_jobs", (), "Loads planned."),
        counter("store_jobs", (), "Stores planned."),
        counter("prefetch_jobs", (), "Fetches from Redis planned for requests that still queue."),
        counter("prefetched_bytes", (), "Of what was fetched from Redis: for such requests."),
        counter("failed_loads", ("reason",), "Loads that did not bring all, over all ranks."),
        counter("failed_stores", ("reason",), "Stores that did not keep all, over all ranks."),
        counter("dropped_stores", (), "Chunks not stored: vLLM reused their blocks first."),
        counter("recomputed_tokens", (), "Tokens whose load failed, computed after all."),
        counter("prefill_saved_tokens", (), "Prompt tokens loaded instead of computed."),
        counter(
            "prefill_saved_seconds",
            (),
            "Estimated compute time of those tokens; load time is not taken off.",
        ),
        counter("loaded_bytes", ("tier",), "cpu: copied to KV caches. redis: fetched."),
        counter("stored_bytes", ("tier",), "cpu: copied from KV caches. redis: written."),
        counter("evicted_chunks", ("tier",), "Chunks that left the CPU tier.", (("cpu",),)),
        counter(
            "cpu_evictions",
            ("reason",),
            "Chunks that made room: expired, over_share (of its tenant), or the oldest.",
            (("expired",), ("over_share",), ("oldest",)),
        ),
        counter(
            "retention_hints",
            ("result",),
            "pin, ttl_seconds and priority of requests: taken, or ignored as out of bounds.",
            (("taken",), ("ignored",)),
        ),
        counter(
            "refused_pins", (), "Times a prompt was not, or not wholly, pinned for want of room."
        ),
        counter(
            "written_chunks",
            ("result",),
            "Ends of writes to Redis: written, already_there, claimed_elsewhere.",
        ),
        counter(
            "dropped_writes",
            ("reason",),
            "Chunks not written to Redis: queue_full (or writes paused), failed.",
        ),
        counter(
            "redis_chunks",
            ("result",),
            "Chunks asked of Redis by loads: hit, or why not (missing, deadline, bad_checksum...).",
        ),
        counter(
            "audits",
            ("result",),
            "Chunks of hits computed as well and compared: match, mismatch, inconclusive.",
            (("match",), ("mismatch",), ("inconclusive",)),
        ),
        gauge("audit_error", ("which",), "Relative error of the last audit, and the largest."),
        gauge("roots_apart", (), "Roots under which this instance shares KV with no other."),
        histogram(
            "lookup_seconds", ("tier",), "Time until a tier said what it holds.", SECONDS_BUCKETS
        ),
        histogram(
            "load_seconds", ("tier",), "Time of a load job in a tier, per rank.", SECONDS_BUCKETS
        ),
        histogram(
            "store_seconds", ("tier",), "Time of a store job or burst, per rank.", SECONDS_BUCKETS
        ),
        histogram(
            "load_bytes_per_second",
            ("tier",),
            "Bandwidth of a load job in a tier.",
            BANDWIDTH_BUCKETS,
        ),
        histogram(
            "store_bytes_per_second",
            ("tier",),
            "Bandwidth of a store job or burst.",
            BANDWIDTH_BUCKETS,
        ),
        gauge("queued_jobs", ("rank",), "Load, store and prefetch jobs not yet ended."),
        gauge("write_queue_bytes", ("rank",), "Bytes waiting to be written to Redis."),
        gauge("cpu_used_bytes", ("rank",), "Bytes of chunks in the CPU tier."),
        gauge(
            "cpu_tenant_bytes",
            ("rank", "tenant"),
            "Bytes of chunks in the CPU tier by cache_salt: the first two hex digits of its BLAKE3 "
            "digest, or none.",
        ),
        gauge("cpu_pinned_bytes", ("rank",), "Bytes of pinned chunks in the CPU tier."),
        gauge("cpu_capacity_bytes", ("rank",), "Size of the CPU tier."),
        gauge(
            "circuit_state",
            ("rank", "node"),
            "Circuit breaker of a server: 0 closed (in use), 1 on trial, 2 open (left alone).",
        ),
        gauge("writes_paused", ("rank",), "1 while Redis refuses writes."),
    ]
)
