"""Engines as their ``/metrics`` show them: parsed, and made into one summary each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_connector.cli.report import CliError
from lmcache_connector.cli.target import metrics_text
from lmcache_connector.metrics.table import PREFIX
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

TIERS = ("cpu", "redis")
_CIRCUITS = {float(state.value): state.name.lower() for state in CircuitState}
# Counters that a summary has by one label, zeros left out.
_BY_LABEL = {
    "bypassed_requests": "reason",
    "decisions": "reason",
    "failed_loads": "reason",
    "failed_stores": "reason",
    "dropped_writes": "reason",
    "written_chunks": "result",
    "redis_chunks": "result",
    "audits": "result",
}
_COUNTERS = (
    *("queried_tokens", "declined_tokens", "recomputed_tokens", "prefill_saved_tokens"),
    *("prefill_saved_seconds", "evicted_chunks"),
)
_GAUGES = (
    *("roots_apart", "queued_jobs", "write_queue_bytes"),
    *("cpu_used_bytes", "cpu_capacity_bytes"),
)
_BY_TIER = ("lookups", "lookup_hits", "hit_tokens", "loaded_bytes", "stored_bytes")


class Snapshot:
    """All samples of one engine at one moment."""

    def __init__(self, url: str, samples: Iterable[Sample]) -> None:
        self.url = url
        self._by_name: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            self._by_name[sample.name].append(sample)

    def select(self, name: str, **labels: str) -> list[Sample]:
        samples = self._by_name.get(name, ())
        return [sample for sample in samples if labels.items() <= sample.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        """Sum over everything but ``labels``, engines and ranks too."""
        return sum(sample.value for sample in self.select(name, **labels))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums per value of one label, zeros left out."""
        sums: dict[str, float] = defaultdict(float)
        for sample in self.select(name):
            sums[sample.labels.get(label, "")] += sample.value
        return {key: value for key, value in sums.items() if value}

    def quantile(self, name: str, q: float, **labels: str) -> float | None:
        """Of a histogram, by linear interpolation inside the bucket, as Prometheus does it."""
        buckets: dict[float, float] = defaultdict(float)
        for sample in self.select(f"{name}_bucket", **labels):
            buckets[float(sample.labels["le"])] += sample.value
        return interpolate(sorted(buckets.items()), q)


def interpolate(buckets: Sequence[tuple[float, float]], q: float) -> float | None:
    """``buckets``: upper bounds and cumulative counts; the last bound is infinite."""
    if not buckets or buckets[-1][1] == 0:
        return None
    wanted, low, below = q * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


def fetch(text: str) -> Snapshot:
    """Raises :class:`CliError` for no answer, and for one of no engine with this connector."""
    snapshot = Snapshot(text, _parse(metrics_text(text)))
    if not snapshot.select(f"{PREFIX}queried_tokens_total"):
        raise CliError(
            f"{text}: these metrics are not of an engine with this connector",
            "start vLLM with --kv-transfer-config, and without --disable-log-stats",
            code=1,
        )
    return snapshot


def _parse(body: str) -> Iterator[Sample]:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(body):
            yield from family.samples
    except (ValueError, LookupError):
        raise CliError("this address answers with no metrics", "is it an engine?") from None


def summarize(snapshot: Snapshot) -> dict[str, Any]:
    """One engine since its start, ready for JSON. Sums over ranks and data-parallel engines."""

    def per_tier(name: str) -> dict[str, float]:
        return {tier: snapshot.total(f"{PREFIX}{name}_total", tier=tier) for tier in TIERS}

    queried = snapshot.select(f"{PREFIX}queried_tokens_total")
    counted = {name: snapshot.total(f"{PREFIX}{name}_total") for name in _COUNTERS}
    labelled = _BY_LABEL.items()
    return {
        "url": snapshot.url,
        "models": sorted({sample.labels["model_name"] for sample in queried}),
        "hit_rate": ratio(counted["prefill_saved_tokens"], counted["queried_tokens"]),
        **counted,
        **{name: per_tier(name) for name in _BY_TIER},
        "load": {tier: _speed(snapshot, "load", "loaded", tier) for tier in TIERS},
        "store": {tier: _speed(snapshot, "store", "stored", tier) for tier in TIERS},
        **{name: snapshot.by_label(f"{PREFIX}{name}_total", label) for name, label in labelled},
        "roots": sorted(snapshot.by_label(f"{PREFIX}info", "root")),
        "audit_error_largest": snapshot.total(f"{PREFIX}audit_error", which="largest"),
        **{name: snapshot.total(f"{PREFIX}{name}") for name in _GAUGES},
        "circuits": circuits(snapshot),
    }


def circuits(snapshot: Snapshot) -> dict[str, str]:
    """Per server the worst state any rank sees."""
    worst: dict[str, float] = defaultdict(float)
    for sample in snapshot.select(f"{PREFIX}circuit_state"):
        worst[sample.labels["node"]] = max(worst[sample.labels["node"]], sample.value)
    return {node: _CIRCUITS.get(value, "unknown") for node, value in sorted(worst.items())}


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _speed(snapshot: Snapshot, verb: str, moved: str, tier: str) -> dict[str, float | None]:
    seconds = f"{PREFIX}{verb}_seconds"
    busy = snapshot.total(f"{seconds}_sum", tier=tier)
    return {
        "jobs": snapshot.total(f"{seconds}_count", tier=tier),
        "seconds_p50": snapshot.quantile(seconds, 0.5, tier=tier),
        "seconds_p95": snapshot.quantile(seconds, 0.95, tier=tier),
        "bytes_per_second": ratio(snapshot.total(f"{PREFIX}{moved}_bytes_total", tier=tier), busy),
    }
