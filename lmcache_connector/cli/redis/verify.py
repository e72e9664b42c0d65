"""``verify``: reads values as an engine would, and checks every byte of them."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lmcache_connector.cli.report import FOUND_WRONG, Report, size
from lmcache_connector.cli.target import Target, open_admin
from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    InvalidValueError,
    Sealer,
    decode_header,
)
from lmcache_connector.storage.compression import check_whole_value
from lmcache_connector.storage.redis.admin import Unreadable
from lmcache_connector.storage.redis.value_names import ValueName

_SHOWN = 20


def run(report: Report, target: Target, namespace: str | None, limit: int) -> int:
    tier = target.tier_config()
    sealer, plain = Sealer(tier.hash_key), Sealer()
    counts: Counter[str] = Counter()
    bad: list[tuple[str, str]] = []
    num_bytes = 0
    with open_admin(tier) as admin, _progress(report) as progress:
        task = progress.add_task("Verifying", total=limit or admin.num_keys())
        for raw, name, value in islice(admin.payloads(namespace), limit or None):
            verdict = judge(name, value, sealer, plain)
            counts[verdict] += 1
            num_bytes += len(value) if isinstance(value, bytes) else 0
            if verdict not in ("sound", "gone", "needs_hash_key"):
                bad.append((raw.decode(errors="replace"), verdict))
            progress.advance(task)
        progress.update(task, total=sum(counts.values()))
    if report.as_json:
        found = [{"name": name, "problem": verdict} for name, verdict in bad]
        report.emit({"ok": not bad, "values": dict(counts), "bytes": num_bytes, "unsound": found})
    else:
        _print(report, counts, bad, num_bytes)
    return FOUND_WRONG if bad else 0


def judge(name: ValueName, value: bytes | Unreadable | None, sealer: Sealer, plain: Sealer) -> str:
    """``sound``, ``gone``, ``needs_hash_key``, or what is wrong, in the words of the metrics."""
    if value is None:
        return "gone"
    if isinstance(value, Unreadable):
        return value.value
    try:
        header = decode_header(value[:HEADER_BYTES])
        if header.key != name.key or header.shard != name.shard:
            return "foreign_key"
        if (header.layer_start, header.layer_end) != (name.layer_start, name.layer_end):
            return "foreign_layers"
        if header.keyed and not sealer.keyed:
            return "needs_hash_key"
        check_whole_value(value, header, sealer if header.keyed else plain)
    except InvalidValueError as error:
        return error.fault.value
    return "sound"


def _print(
    report: Report, counts: Counter[str], bad: list[tuple[str, str]], num_bytes: int
) -> None:
    report.say(f"{counts['sound']} of {sum(counts.values())} values sound, {size(num_bytes)} read.")
    if counts["needs_hash_key"]:
        report.say(
            f"{counts['needs_hash_key']} carry a keyed tag: give --config with the hash_key "
            "to check them."
        )
    if bad:
        report.table(("unsound value", "problem"), bad[:_SHOWN])
        if len(bad) > _SHOWN:
            report.say(f"and {len(bad) - _SHOWN} more; --json lists all.")
        report.say("An engine takes each of them for a miss, and writes it anew.")


def _progress(report: Report) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=report.err,
        transient=True,
        disable=report.as_json,
    )
