"""``purge``: removes values from Redis, a small batch at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import typer

from lmcache_connector.cli.report import CliError, Report, size
from lmcache_connector.cli.target import Target, open_admin
from lmcache_connector.storage.redis.admin import RedisAdmin

_BATCH = 256
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Options:
    """What is to go, as typed; ``idle`` is such as ``12h``."""

    namespace: str | None
    everything: bool
    idle: str | None
    dry_run: bool
    yes: bool


def run(report: Report, target: Target, options: Options) -> None:
    idle_seconds = _seconds(options.idle)
    if (options.namespace is None) != options.everything:
        raise CliError("which values?", "give --namespace NAME, or --all for every namespace")
    with open_admin(target.tier_config()) as admin:
        num_values, num_bytes = _count(admin, options.namespace, idle_seconds)
        removed = 0
        if num_values and not options.dry_run:
            _ask(report, options, num_values, num_bytes)
            removed = _remove(admin, options.namespace, idle_seconds)
    if report.as_json:
        report.emit(
            {
                "ok": True,
                "dry_run": options.dry_run,
                "matching_values": num_values,
                "matching_bytes": num_bytes,
                "removed_values": removed,
            }
        )
    elif options.dry_run:
        report.say(f"{num_values} values, {size(num_bytes)}, would be removed.")
    else:
        report.say(f"{removed} values removed, {size(num_bytes)}.")


def _ask(report: Report, options: Options, num_values: int, num_bytes: int) -> None:
    if options.yes:
        return
    where = f"namespace {options.namespace}" if options.namespace else "all namespaces"
    if report.as_json:
        raise CliError("nobody to ask", "give --yes")
    question = f"Remove {num_values} values, {size(num_bytes)}, from {where}?"
    if not typer.confirm(question, err=True):
        raise CliError("nothing was removed", code=1)


def _count(admin: RedisAdmin, namespace: str | None, idle_seconds: float | None) -> tuple[int, int]:
    sizes = {
        value.raw_name: value.num_bytes
        for value in admin.values(namespace)
        if idle_seconds is None or (value.idle_seconds or 0) >= idle_seconds
    }
    return len(sizes), sum(sizes.values())


def _remove(admin: RedisAdmin, namespace: str | None, idle_seconds: float | None) -> int:
    removed, batches = 0, dict[str, list[bytes]]()
    for node, raw in _victims(admin, namespace, idle_seconds):
        batch = batches.setdefault(node, [])
        batch.append(raw)
        if len(batch) >= _BATCH:
            removed += admin.unlink(node, batch)
            batch.clear()
    return removed + sum(admin.unlink(node, batch) for node, batch in batches.items() if batch)


def _victims(
    admin: RedisAdmin, namespace: str | None, idle_seconds: float | None
) -> Iterator[tuple[str, bytes]]:
    if idle_seconds is None:
        yield from ((node, raw) for node, raw, _ in admin.names(namespace))
        return
    for value in admin.values(namespace):
        if (value.idle_seconds or 0) >= idle_seconds:
            yield value.node, value.raw_name


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise CliError(f"--idle {text!r} is no duration", "for example 90s, 15m, 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]
