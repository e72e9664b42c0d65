"""``top``: engines as they are now, look by look."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.live import Live
from rich.table import Table

from lmcache_connector.cli.engine.scrape import TIERS, Snapshot, circuits, fetch, ratio
from lmcache_connector.cli.report import UNREACHABLE, CliError, Report, plain_table, size
from lmcache_connector.metrics.table import PREFIX

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
class Watched:
    """One engine over time."""

    url: str
    last: Snapshot | None = None
    last_at: float = 0.0
    now: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    hit_rates: deque[float | None] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    loads: deque[float | None] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def look(self, now: float) -> None:
        """An engine that is away is shown as such; it may come back."""
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

    def as_json(self) -> dict[str, Any]:
        return {"url": self.url, "problem": self.problem, **self.now}


def run(report: Report, urls: Sequence[str], interval: float, count: int) -> int | None:
    engines = [Watched(url) for url in urls]
    for engine in engines:
        engine.look(time.monotonic())
    if all(engine.problem for engine in engines):
        raise CliError("; ".join(engine.problem or "" for engine in engines), code=UNREACHABLE)
    if report.as_json:
        _repeat(engines, interval, count, lambda: report.emit(_document(engines)))
        return None
    with Live(_table(engines), console=report.out, auto_refresh=False) as live:
        _repeat(engines, interval, count, lambda: live.update(_table(engines), refresh=True))
    return None


def _repeat(
    engines: Sequence[Watched], interval: float, count: int, show: Callable[[], None]
) -> None:
    looks = 0
    while not count or looks < count:
        time.sleep(interval)
        for engine in engines:
            engine.look(time.monotonic())
        show()
        looks += 1


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
    if not top:
        return " " * len(values)
    steps = len(_BARS) - 1
    return "".join(
        " " if value is None else _BARS[min(steps, max(1, round(value / top * steps)))]
        for value in values
    )


def _document(engines: Sequence[Watched]) -> dict[str, Any]:
    return {"ok": True, "time": time.time(), "engines": [e.as_json() for e in engines]}


def _table(engines: Sequence[Watched]) -> Table:
    return plain_table(_COLUMNS, map(_row, engines))


def _row(engine: Watched) -> tuple[str, ...]:
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
