"""Engines as their ``/metrics`` show them: fetched, parsed, and made into one summary each."""

from __future__ import annotations

import math
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lmcache_connector.cli.report import UNREACHABLE, CliError
from lmcache_connector.metrics.table import PREFIX
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_TIMEOUT_SECONDS = 5.0
_MAX_BYTES = 64 << 20
_CIRCUITS = {float(state.value): state.name.lower() for state in CircuitState}
TIERS = ("cpu", "redis")


class Snapshot:
    """All samples of one engine at one moment."""

    def __init__(self, url: str, samples: Iterable[Sample]) -> None:
        self.url = url
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def has(self, name: str) -> bool:
        return name in self._by_name

    def total(self, name: str, **labels: str) -> float:
        """Sum over everything but ``labels``, engines and ranks too."""
        return sum(sample.value for sample in self.select(name, **labels))

    def select(self, name: str, **labels: str) -> Iterator[Sample]:
        for sample in self._by_name.get(name, ()):
            if labels.items() <= sample.labels.items():
                yield sample

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums per value of one label, zeros left out."""
        sums: dict[str, float] = {}
        for sample in self.select(name):
            key = sample.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + sample.value
        return {key: value for key, value in sums.items() if value}

    def quantile(self, name: str, q: float, **labels: str) -> float | None:
        """Of a histogram, by linear interpolation inside the bucket, as Prometheus does it."""
        buckets: dict[float, float] = {}
        for sample in self.select(f"{name}_bucket", **labels):
            bound = float(sample.labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
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


def metrics_url(text: str) -> str:
    """``localhost:8000`` and the like, completed. Raises :class:`CliError`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.username or parts.password:
        raise CliError("leave user and password out of an engine's address")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CliError(f"{text!r} is no address of an engine", "for example localhost:8000")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"


def fetch(text: str) -> Snapshot:
    """Raises :class:`CliError` if it cannot be had, or is no engine with this connector."""
    url = metrics_url(text)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            body = response.read(_MAX_BYTES).decode(errors="replace")
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CliError(
            f"{text}: {reason}", "is the engine up, and is this its API port?", UNREACHABLE
        ) from None
    snapshot = Snapshot(text, parse(body))
    if not snapshot.has(f"{PREFIX}queried_tokens_total"):
        raise CliError(
            f"{text}: these metrics are not of an engine with this connector",
            "start vLLM with --kv-transfer-config, and without --disable-log-stats",
            code=1,
        )
    return snapshot


def parse(body: str) -> Iterator[Sample]:
    """Raises :class:`CliError` where the text is not in Prometheus' format."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(body):
            yield from family.samples
    except (ValueError, KeyError, IndexError):
        raise CliError("what this address answers are no metrics", "is it an engine?") from None


def summarize(snapshot: Snapshot) -> dict[str, Any]:
    """One engine since its start, ready for JSON. Sums over ranks and data-parallel engines."""

    def total(name: str, **labels: str) -> float:
        return snapshot.total(f"{PREFIX}{name}", **labels)

    def per_tier(name: str) -> dict[str, float]:
        return {tier: total(name, tier=tier) for tier in TIERS}

    queried, saved = total("queried_tokens_total"), total("prefill_saved_tokens_total")
    models = {s.labels["model_name"] for s in snapshot.select(f"{PREFIX}queried_tokens_total")}
    return {
        "url": snapshot.url,
        "models": sorted(models),
        "lookups": per_tier("lookups_total"),
        "lookup_hits": per_tier("lookup_hits_total"),
        "queried_tokens": queried,
        "hit_tokens": per_tier("hit_tokens_total"),
        "hit_rate": ratio(saved, queried),
        "declined_tokens": total("declined_tokens_total"),
        "recomputed_tokens": total("recomputed_tokens_total"),
        "prefill_saved_tokens": saved,
        "prefill_saved_seconds": total("prefill_saved_seconds_total"),
        "loaded_bytes": per_tier("loaded_bytes_total"),
        "stored_bytes": per_tier("stored_bytes_total"),
        "load": {tier: _speed(snapshot, "load", "loaded", tier) for tier in TIERS},
        "store": {tier: _speed(snapshot, "store", "stored", tier) for tier in TIERS},
        "bypassed_requests": snapshot.by_label(f"{PREFIX}bypassed_requests_total", "reason"),
        "decisions": snapshot.by_label(f"{PREFIX}decisions_total", "reason"),
        "failed_loads": snapshot.by_label(f"{PREFIX}failed_loads_total", "reason"),
        "failed_stores": snapshot.by_label(f"{PREFIX}failed_stores_total", "reason"),
        "dropped_writes": snapshot.by_label(f"{PREFIX}dropped_writes_total", "reason"),
        "written_chunks": snapshot.by_label(f"{PREFIX}written_chunks_total", "result"),
        "redis_chunks": snapshot.by_label(f"{PREFIX}redis_chunks_total", "result"),
        "audits": snapshot.by_label(f"{PREFIX}audits_total", "result"),
        "audit_error_largest": total("audit_error", which="largest"),
        "roots": sorted(snapshot.by_label(f"{PREFIX}info", "root")),
        "roots_apart": total("roots_apart"),
        "evicted_chunks": total("evicted_chunks_total"),
        "queued_jobs": total("queued_jobs"),
        "write_queue_bytes": total("write_queue_bytes"),
        "cpu_used_bytes": total("cpu_used_bytes"),
        "cpu_capacity_bytes": total("cpu_capacity_bytes"),
        "circuits": circuits(snapshot),
    }


def circuits(snapshot: Snapshot) -> dict[str, str]:
    """Per server the worst state any rank sees."""
    worst: dict[str, float] = {}
    for sample in snapshot.select(f"{PREFIX}circuit_state"):
        node = sample.labels["node"]
        worst[node] = max(worst.get(node, 0.0), sample.value)
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
