"""Every metric of the connector on vLLM's ``/metrics``: names, labels, meaning.

Names and units follow Prometheus and vLLM: base units, ``_total`` for what only grows (the client
library appends it), and vLLM's own labels ``model_name`` and ``engine`` before those listed here.
``tier`` is ``cpu``, ``peer`` or ``redis``. ``rank`` is a worker's world rank, ``scheduler`` for the
process that looks chunks up. A metric whose unit is bytes or jobs counts over all ranks of an
engine; one in tokens or requests is counted once.
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
_TIERS: Known = (("cpu",), ("peer",), ("redis",))
_BYPASSES: Known = tuple(
    (reason,)
    for reason in (
        *("no_salt", "pooling", "session", "adapter"),
        *("multimodal", "embeddings", "unknown_field"),
    )
)

_FAILURES: Known = (("missing",), ("deadline",), ("cancelled",), ("failed",))
_TRANSFER_FAILURES: Known = tuple(
    (reason,) for reason in ("missing", "unreachable", "lost", "unknown", "deadline", "busy")
)
_DECISIONS: Known = (
    *(("always",), ("unmeasured",), ("load_faster",)),
    *(("compute_faster",), ("source_stalled",)),
)
_READS: Known = tuple(
    (result,)
    for result in (
        *("hit", "missing", "deadline", "truncated_header", "bad_magic", "unknown_version"),
        *("bad_header_length", "unknown_dtype", "bad_flags", "oversized_payload"),
        *("impossible_range", "foreign_dtype", "foreign_layers", "foreign_shard", "foreign_tokens"),
        *("foreign_width", "foreign_length", "foreign_key", "foreign_seal", "bad_checksum"),
        *("forged_tag", "bad_compression"),
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
            "Requests that are not cached: no_salt, pooling, session, adapter, multimodal, "
            "embeddings, unknown_field.",
            _BYPASSES,
        ),
        counter("lookups", ("tier",), "Requests looked up in a tier."),
        counter("scheduler_failures", (), "Scheduler exceptions, which cost hits."),
        counter("lookup_hits", ("tier",), "Requests that found at least one chunk."),
        counter(
            "lookups_given_up",
            (),
            "Requests that stopped waiting for a look-up's answer and counted it as a miss.",
        ),
        counter("queried_tokens", (), "Prompt tokens looked up that vLLM's own cache lacked."),
        counter("hit_tokens", ("tier",), "Tokens planned to be loaded from a tier."),
        counter(
            "declined_tokens", (), "Hit tokens computed because loading them would take longer."
        ),
        counter(
            "decisions", ("reason",), "Compute-or-load decisions on hits, by reason.", _DECISIONS
        ),
        counter("probes", (), "Background measurements of Redis' speed."),
        counter("load_jobs", (), "Loads planned."),
        counter("loads_in_step", (), "Of these, made inside the step that used what they brought."),
        counter("store_jobs", (), "Stores planned."),
        counter("prefetch_jobs", (), "Prefetches from Redis planned for queued requests."),
        counter("prefetched_bytes", (), "Bytes prefetched from Redis for queued requests."),
        counter(
            "failed_loads", ("reason",), "Loads that ended incomplete, over all ranks.", _FAILURES
        ),
        counter(
            "failed_stores", ("reason",), "Stores that ended incomplete, over all ranks.", _FAILURES
        ),
        counter("dropped_stores", (), "Chunks not stored: vLLM reused their blocks first."),
        counter("recomputed_tokens", (), "Tokens recomputed because their load failed."),
        counter("prefill_saved_tokens", (), "Prompt tokens loaded instead of computed."),
        counter(
            "prefill_saved_seconds",
            (),
            "Estimated compute time of the saved tokens; load time is not subtracted.",
        ),
        counter(
            "loaded_bytes", ("tier",), "Bytes copied to KV caches (cpu) or fetched (peer, redis)."
        ),
        counter("stored_bytes", ("tier",), "Bytes copied from KV caches (cpu) or written (redis)."),
        counter("evicted_chunks", ("tier",), "Chunks removed from the CPU tier.", (("cpu",),)),
        counter(
            "cpu_evictions",
            ("reason",),
            "Chunks evicted from the CPU tier: expired, over_share of their tenant, or the oldest.",
            (("expired",), ("over_share",), ("oldest",)),
        ),
        counter(
            "retention_hints",
            ("result",),
            "Hints of requests (pin, ttl_seconds, priority): taken, or ignored (unsound, unknown).",
            (("taken",), ("ignored",)),
        ),
        counter(
            "refused_pins",
            (),
            "Pins refused in whole or in part because the pin budget was full.",
        ),
        counter(
            "written_chunks",
            ("result",),
            "Writes to Redis by result: written, already_there.",
        ),
        counter(
            "dropped_writes",
            ("reason",),
            "Chunks not written to Redis: queue_full (or writes paused), failed.",
            (("queue_full",), ("failed",)),
        ),
        counter(
            "redis_chunks",
            ("result",),
            "Chunks that loads read from Redis: hit, or why not (missing, bad_checksum...).",
            _READS,
        ),
        counter(
            "peer_chunks",
            ("result",),
            "Chunks that loads read from peers: hit, or why not.",
        ),
        counter(
            "peer_mapped_chunks", (), "Chunks copied from the memory of engines on the same host."
        ),
        counter(
            "peer_fallbacks",
            (),
            "Reads by socket because the memory of an engine on the same host could not be read.",
        ),
        counter(
            "audits",
            ("result",),
            "Chunks of hits recomputed and compared: match, mismatch, inconclusive.",
            (("match",), ("mismatch",), ("inconclusive",)),
        ),
        gauge("audit_error", ("which",), "Relative error of the last audit, and the largest."),
        gauge(
            "info",
            ("root", "version"),
            "1 for the root in use: a digest of weights, settings, namespace, chunk size and "
            "hash_key. Instances with the same root share KV.",
        ),
        gauge("roots_apart", (), "Roots that this instance shares with no other since an audit."),
        histogram("lookup_seconds", ("tier",), "Time of a look-up in a tier.", SECONDS_BUCKETS),
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
        gauge("queued_jobs", ("rank",), "Load, store and prefetch jobs in progress or waiting."),
        gauge("write_queue_bytes", ("rank",), "Bytes waiting to be written to Redis."),
        gauge("cpu_used_bytes", ("rank",), "Bytes of chunks in the CPU tier."),
        gauge(
            "cpu_tenant_bytes",
            ("rank", "tenant"),
            "Bytes of chunks in the CPU tier by tenant: the first two hex digits of the BLAKE3 "
            "digest of its cache_salt, or none.",
        ),
        gauge("cpu_pinned_bytes", ("rank",), "Bytes of pinned chunks in the CPU tier."),
        gauge("cpu_capacity_bytes", ("rank",), "Size of the CPU tier."),
        gauge(
            "circuit_state",
            ("rank", "node"),
            "Circuit breaker of a server: 0 closed (in use), 1 on trial, 2 open (not used).",
        ),
        gauge("writes_paused", ("rank",), "1 while Redis refuses writes."),
        counter("p2p_handovers", (), "Prompts computed here for another instance to load."),
        counter("p2p_hit_tokens", (), "Prompt tokens loaded from the instance a request names."),
        counter(
            "p2p_failed_loads",
            ("reason",),
            "Failed loads from the instance a request names: unreachable, lost, unknown, "
            "deadline, busy; or missing, if they ended early.",
            _TRANSFER_FAILURES,
        ),
        counter("p2p_received_bytes", (), "Bytes loaded from instances that requests name."),
        counter("p2p_receive_seconds", (), "Seconds of these loads, on the slowest rank of each."),
        counter(
            "p2p_malformed_requests",
            (),
            "Requests whose id or parameters were malformed or not allowed.",
        ),
        counter(
            "p2p_refused_chunks",
            (),
            "Chunks not kept for other instances: their share of the CPU tier was full.",
        ),
    ]
)
