"""``stats``: engines since their start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_connector.cli.engine.scrape import TIERS, fetch, summarize
from lmcache_connector.cli.report import CliError, Report, duration, size

_TITLES = {"cpu": "CPU", "redis": "Redis"}


def run(report: Report, urls: Sequence[str]) -> int:
    """Engines that answer are shown even if others do not."""
    engines: list[dict[str, Any]] = []
    problems: list[CliError] = []
    for url in urls:
        try:
            engines.append(summarize(fetch(url)))
        except CliError as error:
            problems.append(error)
    if problems and not engines:
        raise problems[0]
    if report.as_json:
        away = [problem.as_json() for problem in problems]
        report.emit({"ok": not problems, "engines": engines, "problems": away})
    else:
        for engine in engines:
            _print(report, engine)
        for problem in problems:
            report.complain(CliError(str(problem)))
    return max((problem.code for problem in problems), default=0)


def _print(report: Report, engine: dict[str, Any]) -> None:
    report.say(f"\n{engine['url']}  {', '.join(engine['models'])}")
    rows = [
        (
            _TITLES[tier],
            f"{engine['lookups'][tier]:.0f}",
            f"{engine['lookup_hits'][tier]:.0f}",
            f"{engine['hit_tokens'][tier]:,.0f}",
            size(engine["loaded_bytes"][tier]),
            _speed(engine["load"][tier]),
            size(engine["stored_bytes"][tier]),
            _speed(engine["store"][tier]),
        )
        for tier in TIERS
    ]
    columns = ("tier", "lookups ", "hits ", "planned ", "loaded ", "at", "stored ", "at")
    report.table(columns, rows)
    for line in _lines(engine):
        report.say(line)


def _lines(engine: dict[str, Any]) -> list[str]:
    rate = engine["hit_rate"]
    hits = f"{rate:.1%}" if rate is not None else "nothing asked yet"
    lost = engine["recomputed_tokens"]
    lines = [
        f"hit rate {hits} of {engine['queried_tokens']:,.0f} tokens that vLLM did not have itself"
        + (f"; {lost:,.0f} more were to be loaded, lost and recomputed" if lost else ""),
        f"prefill saved: {engine['prefill_saved_tokens']:,.0f} tokens, about "
        f"{duration(engine['prefill_saved_seconds'])} of compute",
        f"CPU tier {size(engine['cpu_used_bytes'])} of {size(engine['cpu_capacity_bytes'])}, "
        f"{engine['evicted_chunks']:.0f} chunks evicted; waiting for Redis: "
        f"{size(engine['write_queue_bytes'])}",
    ]
    if engine["roots"]:
        lines.append(f"root {', '.join(engine['roots'])}: engines with the same root share KV")
    titles = {
        "bypassed_requests": "requests that are not cached",
        "decisions": "decisions",
        "failed_loads": "failed loads",
        "failed_stores": "failed stores",
        "dropped_writes": "writes to Redis dropped",
        "redis_chunks": "chunks asked of Redis",
        "audits": "audits",
    }
    lines += [f"{title}: {_counts(engine[key])}" for key, title in titles.items() if engine[key]]
    if engine["declined_tokens"]:
        lines.append(f"{engine['declined_tokens']:,.0f} hit tokens computed, as that is quicker")
    if engine["audits"].get("mismatch"):
        lines.append(
            f"STORED KV WAS WRONG: relative error {engine['audit_error_largest']:.2g}; "
            f"see the engine's log"
        )
    if engine["roots_apart"]:
        lines.append(f"{engine['roots_apart']:.0f} roots share KV with no other engine")
    lines += [f"Redis {node}: circuit {state}" for node, state in engine["circuits"].items()]
    return lines


def _counts(counts: Mapping[str, float]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {count:,.0f}" for name, count in ordered)


def _speed(transfers: Mapping[str, float | None]) -> str:
    speed = transfers["bytes_per_second"]
    if speed is None:
        return "-"
    return f"{size(speed)}/s, p95 {duration(transfers['seconds_p95'])}"
