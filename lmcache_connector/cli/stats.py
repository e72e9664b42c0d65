"""``stats``: summaries of engines' ``/metrics``, since their start or, with ``--watch``, live."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from lmcache_connector.cli.report import (
    FOUND_WRONG,
    UNREACHABLE,
    CliError,
    Report,
    duration,
    size,
    table,
)
from lmcache_connector.cli.target import metrics_text
from lmcache_connector.metrics.table import PREFIX
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

# -- /metrics, parsed and summarised per engine ----------------------------------------------------

TIERS = ("cpu", "peer", "redis")
_CIRCUITS = {float(state.value): state.name.lower() for state in CircuitState}
# Counters summarised by one label, without zeros.
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
    *("prefill_saved_seconds", "cpu_evictions", "lookups_given_up"),
)
_GAUGES = (
    *("roots_apart", "queued_jobs", "write_queue_bytes"),
    *("cpu_used_bytes", "cpu_capacity_bytes"),
)
_GROWING = ("_total", "_bucket", "_sum", "_count")
_BY_TIER = ("lookups", "lookup_hits", "hit_tokens", "loaded_bytes", "stored_bytes")


class Snapshot:
    """All samples of one engine at one moment."""

    def __init__(self, url: str, samples: Iterable[Sample]) -> None:
        self.url = url
        self.taken_at = time.monotonic()
        self._samples = list(samples)

    def select(self, name: str, **labels: str) -> list[Sample]:
        wanted = labels.items()
        return [s for s in self._samples if s.name == name and wanted <= s.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all labels but ``labels``, also over engines and ranks."""
        return sum(sample.value for sample in self.select(name, **labels))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums per value of one label, without zeros."""
        sums: dict[str, float] = defaultdict(float)
        for sample in self.select(name):
            sums[sample.labels.get(label, "")] += sample.value
        return {key: value for key, value in sums.items() if value}

    def since(self, before: Snapshot) -> Snapshot:
        """Increments since ``before``, and current gauges. A counter that fell belongs to an engine
        that has restarted."""
        base = {_series(sample): sample.value for sample in before._samples}
        grown: list[Sample] = []
        for sample in self._samples:
            was = base.get(_series(sample), 0.0) if sample.name.endswith(_GROWING) else 0.0
            now = sample.value
            grown.append(sample._replace(value=now - was if now >= was else now))
        return Snapshot(self.url, grown)

    def quantile(self, name: str, q: float, **labels: str) -> float | None:
        """Quantile of a histogram, interpolated linearly within the bucket, as Prometheus does."""
        buckets: dict[float, float] = defaultdict(float)
        for sample in self.select(f"{name}_bucket", **labels):
            buckets[float(sample.labels["le"])] += sample.value
        return interpolate(sorted(buckets.items()), q)


def _series(sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


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
    """Raises :class:`CliError` without an answer, or if the engine lacks this connector."""
    snapshot = Snapshot(text, _parse(metrics_text(text)))
    if not snapshot.select(f"{PREFIX}queried_tokens_total"):
        raise CliError(
            f"{text}: these metrics include none of this connector",
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
        raise CliError("this address serves no metrics", "give an engine's API address") from None


def summarize(snapshot: Snapshot) -> dict[str, Any]:
    """One engine's summary for JSON, summed over ranks and data-parallel engines."""

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
        "running_requests": snapshot.total("vllm:num_requests_running"),
        "waiting_requests": snapshot.total("vllm:num_requests_waiting"),
        "circuits": _circuits(snapshot),
    }


def _circuits(snapshot: Snapshot) -> dict[str, str]:
    """Per server, the worst state that any rank sees."""
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


# -- since the start -------------------------------------------------------------------------------

_TITLES = {
    "bypassed_requests": "requests that are not cached",
    "decisions": "decisions",
    "failed_loads": "failed loads",
    "failed_stores": "failed stores",
    "dropped_writes": "failed writes to Redis",
    "redis_chunks": "chunks read from Redis, by probes too",
    "audits": "audits",
}


def run(report: Report, engines: Sequence[str]) -> int:
    """Show the engines that answer, even if others do not. Returns the exit code."""
    readings = [_fetch_or_error(engine) for engine in engines]
    found = [summarize(reading) for reading in readings if isinstance(reading, Snapshot)]
    problems = [reading for reading in readings if isinstance(reading, CliError)]
    if problems and not found:
        raise problems[0]
    away = [problem.as_json() for problem in problems]
    lines = [item for engine in found for item in _described(engine)]
    is_wrong = any(engine["audits"].get("mismatch") for engine in found)
    report.emit({"ok": not (problems or is_wrong), "engines": found, "problems": away}, *lines)
    for problem in problems if not report.as_json else ():
        report.complain(CliError(str(problem)))
    return FOUND_WRONG if is_wrong else max((problem.code for problem in problems), default=0)


def _described(engine: dict[str, Any]) -> Iterator[str | Table]:
    yield f"\n{engine['url']}  {', '.join(engine['models'])}"
    columns = ("tier", "lookups ", "hits ", "planned ", "copied in ", "at", "copied out ", "at")
    yield table(
        columns,
        [
            (
                {"cpu": "CPU", "peer": "peers", "redis": "Redis"}[tier],
                f"{engine['lookups'][tier]:.0f}",
                f"{engine['lookup_hits'][tier]:.0f}",
                f"{engine['hit_tokens'][tier]:,.0f}",
                size(engine["loaded_bytes"][tier]),
                _speed_text(engine["load"][tier]),
                size(engine["stored_bytes"][tier]),
                _speed_text(engine["store"][tier]),
            )
            for tier in TIERS
        ],
    )
    rate, lost = engine["hit_rate"], engine["recomputed_tokens"]
    yield (
        f"hit rate {'nothing asked yet' if rate is None else f'{rate:.1%}'} of "
        f"{engine['queried_tokens']:,.0f} tokens that vLLM did not have itself"
        + (f"; {lost:,.0f} more were planned, then lost and recomputed" if lost else "")
    )
    yield (
        f"prefill saved: {engine['prefill_saved_tokens']:,.0f} tokens, about "
        f"{duration(engine['prefill_saved_seconds'])} of compute"
    )
    yield (
        f"CPU tier {size(engine['cpu_used_bytes'])} of {size(engine['cpu_capacity_bytes'])}, "
        f"{engine['cpu_evictions']:.0f} chunks evicted; waiting for Redis: "
        f"{size(engine['write_queue_bytes'])}"
        if engine["cpu_capacity_bytes"]
        else "an engine reports its tiers and root with its first request"
    )
    if engine["roots"]:
        yield f"root {', '.join(engine['roots'])}: engines with the same root share KV"
    for name, title in _TITLES.items():
        if engine[name]:
            yield f"{title}: {_counts(engine[name])}"
    if engine["declined_tokens"]:
        yield f"{engine['declined_tokens']:,.0f} hit tokens computed: judged not worth loading"
    if engine["lookups_given_up"]:
        yield f"{engine['lookups_given_up']:,.0f} lookups took too long for their requests to wait"
    if engine["audits"].get("mismatch"):
        error = engine["audit_error_largest"]
        yield f"STORED KV WAS WRONG: relative error {error:.2g}; see the engine's log"
    if engine["roots_apart"]:
        yield f"{engine['roots_apart']:.0f} roots are no longer shared, after a failed audit"
    for node, state in engine["circuits"].items():
        yield f"{node}: circuit {state}"


def _counts(counts: Mapping[str, float]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {count:,.0f}" for name, count in ordered)


def _speed_text(transfers: Mapping[str, float | None]) -> str:
    speed = transfers["bytes_per_second"]
    return "-" if speed is None else f"{size(speed)}/s, p95 {duration(transfers['seconds_p95'])}"


# -- --watch ---------------------------------------------------------------------------------------

_COLUMNS = (
    *("engine", "hit rate", "saved", "load", "remote load", "Redis store"),
    *("CPU tier", "queue", "running", "nodes"),
)


def watch(report: Report, urls: Sequence[str], interval: float, count: int) -> int:
    """A terminal shows the latest of ``count`` readings (0: until Ctrl-C), a pipe each one.
    Returns the exit code of the last."""
    readings = {url: _fetch_or_error(url) for url in urls}
    problems = [str(found) for found in readings.values() if isinstance(found, CliError)]
    if len(problems) == len(readings):
        raise CliError("; ".join(problems), code=UNREACHABLE)
    is_live, num_readings, code = report.out.is_terminal and not report.as_json, 0, 0
    with Live(console=Console(), auto_refresh=False) if is_live else nullcontext() as live:
        while not count or num_readings < count:
            started = time.monotonic()
            time.sleep(interval)
            engines = []
            for url, before in readings.items():
                readings[url] = _fetch_or_error(url)
                engines.append(_since(url, before, readings[url], started))
            num_readings += 1
            away = [found for found in readings.values() if isinstance(found, CliError)]
            code = max((problem.code for problem in away), default=0)
            shown = table(_COLUMNS, map(_row, engines))
            if live is not None:
                live.update(shown, refresh=True)
            else:
                report.emit({"ok": not away, "time": time.time(), "engines": engines}, shown)
    return code


def _fetch_or_error(url: str) -> Snapshot | CliError:
    """Keep the error: an unreachable engine may come back."""
    try:
        return fetch(url)
    except CliError as error:
        return error


def _since(
    url: str, before: Snapshot | CliError, now: Snapshot | CliError, started: float
) -> dict[str, Any]:
    """:func:`summarize` of the time between two readings; without the first, since ``started``."""
    if isinstance(now, CliError):
        return {"url": url, "problem": str(now)}
    base, at = (now, started) if isinstance(before, CliError) else (before, before.taken_at)
    return {"problem": None, "seconds": now.taken_at - at, **summarize(now.since(base))}


def _row(engine: dict[str, Any]) -> tuple[str, ...]:
    if engine["problem"] is not None:
        return (engine["url"], "away")

    def speed(verb: str, *tiers: str) -> str:
        return f"{size(sum(engine[verb][tier] for tier in tiers) / engine['seconds'])}/s"

    rate, capacity = engine["hit_rate"], engine["cpu_capacity_bytes"]
    lost = ratio(engine["recomputed_tokens"], engine["queried_tokens"])
    states = set(engine["circuits"].values())
    return (
        engine["url"],
        "-" if rate is None else f"{rate:.0%}" + (f", {lost:.0%} lost" if lost else ""),
        f"{engine['prefill_saved_tokens'] / engine['seconds']:,.0f} tok/s",
        speed("loaded_bytes", "cpu"),
        speed("loaded_bytes", "peer", "redis"),
        speed("stored_bytes", "redis"),
        f"{engine['cpu_used_bytes'] / capacity:.0%} of {size(capacity)}" if capacity else "-",
        size(engine["write_queue_bytes"]),
        f"{engine['running_requests']:.0f}+{engine['waiting_requests']:.0f}",
        "DOWN" if "open" in states else "ok" if states else "-",
    )
