"""``stats``: engines since their start, or with ``--watch`` as they are now, look by look."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from lmcache_connector.cli.metrics import TIERS, Snapshot, circuits, fetch, ratio, summarize
from lmcache_connector.cli.report import UNREACHABLE, CliError, Report, duration, size, table
from lmcache_connector.metrics.table import PREFIX

_TITLES = {
    "bypassed_requests": "requests that are not cached",
    "decisions": "decisions",
    "failed_loads": "failed loads",
    "failed_stores": "failed stores",
    "dropped_writes": "writes to Redis dropped",
    "redis_chunks": "chunks asked of Redis",
    "audits": "audits",
}


def run(report: Report, engines: Sequence[str]) -> int:
    """Engines that answer are shown even if others do not."""
    found: list[dict[str, Any]] = []
    problems: list[CliError] = []
    for engine in engines:
        try:
            found.append(summarize(fetch(engine)))
        except CliError as error:
            problems.append(error)
    if problems and not found:
        raise problems[0]
    away = [problem.as_json() for problem in problems]
    lines = [item for engine in found for item in _described(engine)]
    report.emit({"ok": not problems, "engines": found, "problems": away}, *lines)
    for problem in problems if not report.as_json else ():
        report.complain(CliError(str(problem)))
    return max((problem.code for problem in problems), default=0)


def _described(engine: dict[str, Any]) -> Iterator[str | Table]:
    yield f"\n{engine['url']}  {', '.join(engine['models'])}"
    columns = ("tier", "lookups ", "hits ", "planned ", "loaded ", "at", "stored ", "at")
    yield table(
        columns,
        [
            (
                {"cpu": "CPU", "redis": "Redis"}[tier],
                f"{engine['lookups'][tier]:.0f}",
                f"{engine['lookup_hits'][tier]:.0f}",
                f"{engine['hit_tokens'][tier]:,.0f}",
                size(engine["loaded_bytes"][tier]),
                _speed(engine["load"][tier]),
                size(engine["stored_bytes"][tier]),
                _speed(engine["store"][tier]),
            )
            for tier in TIERS
        ],
    )
    rate, lost = engine["hit_rate"], engine["recomputed_tokens"]
    yield (
        f"hit rate {'nothing asked yet' if rate is None else f'{rate:.1%}'} of "
        f"{engine['queried_tokens']:,.0f} tokens that vLLM did not have itself"
        + (f"; {lost:,.0f} more were to be loaded, lost and recomputed" if lost else "")
    )
    yield (
        f"prefill saved: {engine['prefill_saved_tokens']:,.0f} tokens, about "
        f"{duration(engine['prefill_saved_seconds'])} of compute"
    )
    yield (
        f"CPU tier {size(engine['cpu_used_bytes'])} of {size(engine['cpu_capacity_bytes'])}, "
        f"{engine['evicted_chunks']:.0f} chunks evicted; waiting for Redis: "
        f"{size(engine['write_queue_bytes'])}"
    )
    if engine["roots"]:
        yield f"root {', '.join(engine['roots'])}: engines with the same root share KV"
    for name, title in _TITLES.items():
        if engine[name]:
            yield f"{title}: {_counts(engine[name])}"
    if engine["declined_tokens"]:
        yield f"{engine['declined_tokens']:,.0f} hit tokens computed, as that is quicker"
    if engine["audits"].get("mismatch"):
        error = engine["audit_error_largest"]
        yield f"STORED KV WAS WRONG: relative error {error:.2g}; see the engine's log"
    if engine["roots_apart"]:
        yield f"{engine['roots_apart']:.0f} roots share KV with no other engine"
    for node, state in engine["circuits"].items():
        yield f"Redis {node}: circuit {state}"


def _counts(counts: Mapping[str, float]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {count:,.0f}" for name, count in ordered)


def _speed(transfers: Mapping[str, float | None]) -> str:
    speed = transfers["bytes_per_second"]
    return "-" if speed is None else f"{size(speed)}/s, p95 {duration(transfers['seconds_p95'])}"


# -- --watch ---------------------------------------------------------------------------------------

_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 24
_COLUMNS = (
    *("engine", "hit rate", "", "saved", "CPU load", "Redis load", "", "Redis store"),
    *("CPU tier", "queue", "running", "Redis"),
)
_RATES = {
    "queried_tokens_per_second": ("queried_tokens_total", {}),
    "saved_tokens_per_second": ("prefill_saved_tokens_total", {}),
    "recomputed_tokens_per_second": ("recomputed_tokens_total", {}),
    "failed_loads_per_second": ("failed_loads_total", {}),
    "dropped_writes_per_second": ("dropped_writes_total", {}),
    **{f"{t}_hit_tokens_per_second": ("hit_tokens_total", {"tier": t}) for t in TIERS},
    **{f"{t}_loaded_bytes_per_second": ("loaded_bytes_total", {"tier": t}) for t in TIERS},
    **{f"{t}_stored_bytes_per_second": ("stored_bytes_total", {"tier": t}) for t in TIERS},
}


@dataclass(slots=True)
class _Watched:
    """One engine over time."""

    url: str
    last: Snapshot | None = None
    last_at: float = 0.0
    now: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    hit_rates: deque[float | None] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    loads: deque[float | None] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def look(self) -> None:
        """An engine that is away is shown as such; it may come back."""
        now = time.monotonic()
        try:
            snapshot = fetch(self.url)
        except CliError as error:
            self.problem, self.now, self.last = str(error), {}, None
            return
        self.problem = None
        self.now = measured(snapshot, self.last, now - self.last_at)
        self.last, self.last_at = snapshot, now
        self.hit_rates.append(self.now["hit_rate"])
        self.loads.append(sum(self.now[f"{t}_loaded_bytes_per_second"] for t in TIERS))


def watch(report: Report, urls: Sequence[str], interval: float, count: int) -> None:
    """A terminal shows the last look; a pipe gets each of ``count`` (0: until Ctrl-C)."""
    engines = [_Watched(url) for url in urls]
    for engine in engines:
        engine.look()
    if all(engine.problem for engine in engines):
        raise CliError("; ".join(engine.problem or "" for engine in engines), code=UNREACHABLE)
    is_live = report.out.is_terminal and not report.as_json
    with Live(console=Console(), auto_refresh=False) if is_live else nullcontext() as live:
        looks = 0
        while not count or looks < count:
            time.sleep(interval)
            for engine in engines:
                engine.look()
            shown = table(_COLUMNS, map(_row, engines))
            looks += 1
            if live is not None:
                live.update(shown, refresh=True)
                continue
            found = [{"url": e.url, "problem": e.problem, **e.now} for e in engines]
            report.emit({"ok": True, "time": time.time(), "engines": found}, shown)


def measured(now: Snapshot, before: Snapshot | None, seconds: float) -> dict[str, Any]:
    """Rates between two looks, ``seconds`` apart, and gauges as they are now.

    A counter that fell belongs to an engine that has restarted.
    """
    found: dict[str, Any] = {}
    for key, (name, labels) in _RATES.items():
        value = now.total(PREFIX + name, **labels)
        base = before.total(PREFIX + name, **labels) if before is not None else value
        found[key] = max(0.0, value - base if value >= base else value) / max(seconds, 1e-9)
    for rate, part in (("hit_rate", "saved"), ("lost_rate", "recomputed")):
        found[rate] = ratio(found[f"{part}_tokens_per_second"], found["queried_tokens_per_second"])
    for name in ("queued_jobs", "write_queue_bytes", "cpu_used_bytes", "cpu_capacity_bytes"):
        found[name] = now.total(PREFIX + name)
    found["running_requests"] = now.total("vllm:num_requests_running")
    found["waiting_requests"] = now.total("vllm:num_requests_waiting")
    found["circuits"] = circuits(now)
    return found


def sparkline(values: Sequence[float | None], highest: float | None = None) -> str:
    """One character each, the tallest for ``highest`` (or the most seen); a blank for ``None``."""
    top = highest or max((value for value in values if value), default=0.0)
    steps = len(_BARS) - 1
    return "".join(
        " " if value is None or not top else _BARS[min(steps, max(1, round(value / top * steps)))]
        for value in values
    )


def _row(engine: _Watched) -> tuple[str, ...]:
    if engine.problem is not None:
        return (engine.url, "away")
    now = engine.now
    rate, lost, capacity = now["hit_rate"], now["lost_rate"], now["cpu_capacity_bytes"]
    states = set(now["circuits"].values())
    return (
        engine.url,
        "-" if rate is None else f"{rate:.0%}" + (f", {lost:.0%} lost" if lost else ""),
        sparkline(engine.hit_rates, 1.0),
        f"{now['saved_tokens_per_second']:,.0f} tok/s",
        f"{size(now['cpu_loaded_bytes_per_second'])}/s",
        f"{size(now['redis_loaded_bytes_per_second'])}/s",
        sparkline(engine.loads),
        f"{size(now['redis_stored_bytes_per_second'])}/s",
        f"{now['cpu_used_bytes'] / capacity:.0%} of {size(capacity)}" if capacity else "-",
        size(now["write_queue_bytes"]),
        f"{now['running_requests']:.0f}+{now['waiting_requests']:.0f}",
        "DOWN" if "open" in states else "ok" if states else "-",
    )
