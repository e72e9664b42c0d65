"""Every metric of the connector on vLLM's ``/metrics``: name, labels, meaning.

Names and units follow Prometheus and vLLM: base units, ``_total`` for counters (appended by the
client library), and vLLM's labels ``model_name`` and ``engine`` before the labels listed here.
``tier`` is ``cpu``, ``peer`` or ``redis``. ``rank`` is a worker's world rank, or ``scheduler``.
Counts of workers (failed jobs; bytes, seconds and chunks that moved) add up over all ranks of an
engine; the scheduler side counts requests, tokens, planned jobs and audits once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lmcache_connector.storage.chunk_codec import ValueFault

PREFIX = "vllm:lmcache_"

SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
BANDWIDTH_BUCKETS = (1e7, 3e7, 1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2e10, 5e10, 1e11)

_TIERS = ("cpu", "peer", "redis")
_BYPASSES = (
    *("no_salt", "pooling", "session", "adapter"),
    *("multimodal", "embeddings", "unknown_field"),
)
_FAILURES = ("missing", "deadline", "cancelled", "failed")
_TRANSFER_FAILURES = ("missing", "unreachable", "lost", "unknown", "deadline", "busy")
_DECISIONS = ("always", "unmeasured", "load_faster", "compute_faster", "source_stalled")
_READS = ("hit", "missing", "deadline", *(fault.value for fault in ValueFault))


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """``known``: label values to start at zero, so that a rate has a first value. ``buckets``:
    upper bounds of a histogram's buckets."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    documentation: str
    known: tuple[tuple[str, ...], ...]
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The registered name; a counter is exported with ``_total`` appended."""
        return PREFIX + self.name


def counter(name: str, documentation: str, *labels: str, known: Sequence[str] = ()) -> Metric:
    return Metric(name, Kind.COUNTER, labels, documentation, _known(labels, known))


def gauge(name: str, documentation: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, labels, documentation, _known(labels))


def histogram(name: str, documentation: str, *labels: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, labels, documentation, _known(labels), buckets)


def _known(labels: tuple[str, ...], known: Sequence[str] = ()) -> tuple[tuple[str, ...], ...]:
    """The known values of a single label; without labels, the empty combination."""
    if labels == ("tier",) and not known:
        known = _TIERS
    return tuple((value,) for value in known) if labels else ((),)


_ALL = (
    counter(
        "bypassed_requests",
        "Requests that are not cached: no_salt, pooling, session, adapter, multimodal, embeddings, "
        "unknown_field.",
        "reason",
        known=_BYPASSES,
    ),
    counter("lookups", "Lookups of a request's chunks in a tier.", "tier"),
    counter("scheduler_failures", "Exceptions in the connector's scheduler side; they cost hits."),
    counter("lookup_hits", "Requests with at least one chunk of their hit in a tier.", "tier"),
    counter("lookups_given_up", "Lookups whose requests went on without the answer."),
    counter("queried_tokens", "Prompt tokens looked up that vLLM's own cache lacked."),
    counter("hit_tokens", "Tokens planned to be loaded from a tier.", "tier"),
    counter("declined_tokens", "Hit tokens computed because a decision was against loading them."),
    counter(
        "decisions", "Compute-or-load decisions on hits, by reason.", "reason", known=_DECISIONS
    ),
    counter("probes", "Background measurements of the speed of Redis."),
    counter("load_jobs", "Loads planned."),
    counter("loads_in_step", "Loads executed inside the step that uses them."),
    counter("store_jobs", "Stores planned."),
    counter(
        "failed_loads", "Loads that ended incomplete, over all ranks.", "reason", known=_FAILURES
    ),
    counter(
        "failed_stores", "Stores that ended incomplete, over all ranks.", "reason", known=_FAILURES
    ),
    counter("dropped_stores", "Chunks not stored: blocks reused by vLLM, or weights changed."),
    counter("recomputed_tokens", "Tokens recomputed because their load failed."),
    counter("prefill_saved_tokens", "Prompt tokens loaded instead of computed."),
    counter(
        "prefill_saved_seconds",
        "Estimated compute time of the saved tokens; load time is not subtracted.",
    ),
    counter("loaded_bytes", "Bytes copied to KV caches (cpu) or to memory (peer, redis).", "tier"),
    counter("stored_bytes", "Bytes copied from KV caches (cpu) or written (redis).", "tier"),
    counter(
        "cpu_evictions",
        "Chunks evicted from the CPU tier: expired, over_share, or oldest.",
        "reason",
        known=("expired", "over_share", "oldest"),
    ),
    counter(
        "retention_hints",
        "Hints of requests (pin, ttl_seconds, priority): taken, or ignored (malformed or unknown).",
        "result",
        known=("taken", "ignored"),
    ),
    counter("refused_pins", "Pins refused in whole or in part because the pin budget was full."),
    counter("written_chunks", "Writes to Redis, by probes too: written, already_there.", "result"),
    counter(
        "dropped_writes",
        "Failed writes, tried again from memory: queue_full (or writes paused), failed.",
        "reason",
        known=("queue_full", "failed"),
    ),
    counter(
        "redis_chunks",
        "Chunks read from Redis, by probes too: hit, or why it missed (missing, bad_checksum...).",
        "result",
        known=_READS,
    ),
    counter("peer_chunks", "Chunks read from peers: hit, or why it missed.", "result"),
    counter(
        "peer_mapped_chunks",
        "Chunks copied from the memory of engines, or other ranks, on the same host.",
    ),
    counter(
        "peer_fallbacks",
        "Reads over a socket because the memory of an engine on the same host was unreadable.",
    ),
    counter(
        "audits",
        "Chunks of hits recomputed and compared: match, mismatch, inconclusive.",
        "result",
        known=("match", "mismatch", "inconclusive"),
    ),
    gauge("audit_error", "Relative error of an audit: the last, and the largest.", "which"),
    gauge(
        "info",
        "1 for the root in use: a digest of weights, settings, namespace, chunk size and hash_key. "
        "Instances with the same root share KV.",
        "root",
        "version",
    ),
    gauge("roots_apart", "Roots that this instance no longer shares after a failed audit."),
    histogram("lookup_seconds", "Time of a lookup in a tier.", "tier", buckets=SECONDS_BUCKETS),
    histogram(
        "load_seconds", "Time of a load's reads (cpu: its copies).", "tier", buckets=SECONDS_BUCKETS
    ),
    histogram(
        "store_seconds", "Time of a store job or batch of writes.", "tier", buckets=SECONDS_BUCKETS
    ),
    histogram(
        "load_bytes_per_second",
        "Bandwidth of a load job in a tier.",
        "tier",
        buckets=BANDWIDTH_BUCKETS,
    ),
    histogram(
        "store_bytes_per_second",
        "Bandwidth of a store job (cpu) or batch of writes (redis).",
        "tier",
        buckets=BANDWIDTH_BUCKETS,
    ),
    gauge("queued_jobs", "Load and store jobs in progress or waiting.", "rank"),
    gauge("write_queue_bytes", "Bytes waiting to be written to Redis.", "rank"),
    gauge("cpu_used_bytes", "Bytes of chunks in the CPU tier.", "rank"),
    gauge(
        "cpu_tenant_bytes",
        "Bytes of chunks in the CPU tier by tenant: the first two hex digits of the BLAKE3 digest "
        "of its cache_salt, or none.",
        "rank",
        "tenant",
    ),
    gauge("cpu_pinned_bytes", "Bytes of pinned chunks in the CPU tier.", "rank"),
    gauge("cpu_capacity_bytes", "Size of the CPU tier.", "rank"),
    gauge(
        "circuit_state",
        "Circuit breaker of a server or peer: 0 closed (in use), 1 half open (one failure opens "
        "it), 2 open (not used).",
        "rank",
        "node",
    ),
    gauge("writes_paused", "1 from a refused or repeatedly slow write until one succeeds.", "rank"),
    counter("p2p_handovers", "Prompts this instance computed for another instance to load."),
    counter("p2p_hit_tokens", "Prompt tokens loaded from the instance a request names."),
    counter(
        "p2p_failed_loads",
        "Failed loads from the instance a request names: unreachable, lost, unknown, deadline, "
        "busy, or missing (the load ended early).",
        "reason",
        known=_TRANSFER_FAILURES,
    ),
    counter("p2p_received_bytes", "Bytes loaded from instances that requests name."),
    counter("p2p_receive_seconds", "Duration of KV transfers, on the slowest rank of each."),
    counter(
        "p2p_malformed_requests", "Requests whose id or parameters were malformed or not allowed."
    ),
    counter(
        "p2p_refused_chunks",
        "Chunks not kept for other instances: their share of the CPU tier was full.",
    ),
)
METRICS = {metric.name: metric for metric in _ALL}
