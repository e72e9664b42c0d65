"""Values in Redis: ``ls`` counts them, ``verify`` checks every byte, ``purge`` removes them.

A value does not name its model, only its shape: ``ls`` lists models of one shape together.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any

import typer

from lmcache_connector.cli.report import FOUND_WRONG, CliError, Report, duration, size, span, table
from lmcache_connector.cli.target import open_admin
from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    InvalidValueError,
    Sealer,
    ValueFault,
    ValueHeader,
    decode_header,
)
from lmcache_connector.storage.compression import check_whole_value
from lmcache_connector.storage.redis.admin import ServerFacts, StoredValue, Unreadable
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.value_names import ValueName

_MAX_CHUNKS = 20
_MAX_SHOWN = 20
_BATCH = 256
_SHAPE = attrgetter("dtype", "num_shards", "num_tokens", "content_width", "keyed")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

# -- ls --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """The values of one namespace and shape. ``idle``, ``ttl``: minimum and maximum, in seconds."""

    layers: int = 0
    chunks: set[bytes] = field(default_factory=set)
    values: int = 0
    bytes: int = 0
    idle: list[float | None] = field(default_factory=lambda: [None, None])
    ttl: list[float | None] = field(default_factory=lambda: [None, None])

    def add(self, value: StoredValue) -> None:
        self.layers = max(self.layers, value.name.layer_end)
        self.chunks.add(value.name.key)
        self.values += 1
        self.bytes += value.num_bytes
        for bounds, seconds in ((self.idle, value.idle_seconds), (self.ttl, value.ttl_seconds)):
            known = [each for each in (*bounds, seconds) if each is not None]
            bounds[:] = [min(known, default=None), max(known, default=None)]


def ls(report: Report, tier: RedisTierConfig, namespace: str | None) -> None:
    """List namespaces and model shapes: chunks, bytes, ages."""
    # By namespace and shape; shape None: invalid header.
    groups: dict[tuple[str, tuple[Any, ...] | None], _Group] = defaultdict(_Group)
    with open_admin(tier) as admin:
        servers = [admin.facts(node) for node in admin.nodes()]
        for value in admin.values(namespace):
            header, _ = _judge_header(value)
            groups[value.name.namespace, _SHAPE(header) if header else None].add(value)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], -item[1].bytes))
    documents, rows = [], []
    for (name, shape), group in ordered:
        dtype, heads, tokens, width, keyed = shape or (None,) * 5
        documents.append(
            {
                "namespace": name,
                "dtype": dtype,
                "layers": group.layers,
                "kv_heads": heads,
                "chunk_tokens": tokens,
                "keyed": keyed,
                "sound_headers": shape is not None,
                "chunks": len(group.chunks),
                "tokens": len(group.chunks) * tokens if shape else None,
                "values": group.values,
                "bytes": group.bytes,
                "idle_seconds": group.idle,
                "ttl_seconds": group.ttl,
            }
        )
        model = (
            f"{group.layers} layers, {dtype}, {heads} KV heads of {width} B, chunks of {tokens} "
            f"tokens{', keyed' if keyed else ''}"
        )
        counts = (str(len(group.chunks)), str(group.values), size(group.bytes))
        rows.append(
            (
                name,
                model if shape else "unsound headers",
                *counts,
                span(group.idle),
                span(group.ttl),
            )
        )
    columns = ("namespace", "model", "chunks ", "values ", "size ", "unused for", "expires in")
    report.emit(
        {"ok": True, "servers": [asdict(facts) for facts in servers], "groups": documents},
        *map(describe_server, servers),
        table(columns, rows) if rows else "No chunks found.",
    )


def describe_server(facts: ServerFacts) -> str:
    if facts.version is None:
        return f"{facts.node}: INFO is not permitted"
    limit = size(facts.max_bytes) if facts.max_bytes else "no limit"
    return (
        f"{facts.node}: version {facts.version}, {size(facts.used_bytes or 0)} of {limit}, "
        f"{facts.policy}, {facts.evicted_keys} evicted"
    )


def _judge_header(value: StoredValue) -> tuple[ValueHeader | None, str]:
    """The header, or ``None`` and the problem."""
    try:
        return decode_header(value.header), ""
    except InvalidValueError as error:
        return None, str(error)


def ls_chunk(report: Report, tier: RedisTierConfig, namespace: str | None, digits: str) -> None:
    """List the values of chunks whose keys begin with ``digits``."""
    prefix = digits.lower()
    if not re.fullmatch("[0-9a-f]{1,64}", prefix):
        raise CliError(
            f"{digits!r} is not the beginning of a chunk key",
            "names in Redis are lmc:{NAMESPACE:KEY}:..., and KEY has 64 hex digits",
        )
    with open_admin(tier) as admin:
        values = sorted(
            admin.values(namespace, prefix),
            key=lambda value: (value.name.key, value.name.shard, value.name.layer_start),
        )
    num_chunks = len({(value.name.namespace, value.name.key) for value in values})
    if not values:
        raise CliError(f"no chunk begins with {prefix}", "it may have been evicted", code=1)
    if num_chunks > _MAX_CHUNKS:
        raise CliError(f"{num_chunks} chunks begin with {prefix}", "give more digits")
    documents, rows = [], []
    for value in values:
        name, (header, problem) = value.name, _judge_header(value)
        if header is not None and header.key != name.key:
            header, problem = None, "the header names another chunk"
        text = f"unsound: {problem}"
        if header is not None:
            text = f"{header.dtype}, {header.num_tokens} tokens"
            text += f", head {header.shard} of {header.num_shards}"
            if header.compressed_bytes:
                text += f", compressed from {size(header.payload_bytes)}"
        documents.append(
            {
                "name": value.raw_name.decode(errors="replace"),
                "namespace": name.namespace,
                "chunk": name.key.hex(),
                "bytes": value.num_bytes,
                "idle_seconds": value.idle_seconds,
                "ttl_seconds": value.ttl_seconds,
                "header": header and {**asdict(header), "key": header.key.hex()},
                "problem": None if header else text,
            }
        )
        lifetimes = duration(value.idle_seconds), duration(value.ttl_seconds)
        layers = f"{name.layer_start} to {name.layer_end - 1}"
        rows.append(
            (name.key.hex(), layers, str(name.shard), size(value.num_bytes), *lifetimes, text)
        )
    columns = ("chunk", "layers", "head ", "size ", "unused for", "expires in", "header")
    report.emit({"ok": True, "values": documents}, table(columns, rows))


# -- verify ----------------------------------------------------------------------------------------


def verify(report: Report, tier: RedisTierConfig, namespace: str | None, limit: int) -> int:
    """Read values as an engine would, and check every byte. Returns the exit code."""
    sealer, plain = Sealer(tier.hash_key), Sealer()
    counts: Counter[str] = Counter()
    bad: list[tuple[str, str]] = []
    num_bytes = 0
    with open_admin(tier) as admin, report.progress() as progress:
        task = progress.add_task("Verifying", total=limit or admin.num_keys())
        for raw, name, value in islice(admin.payloads(namespace), limit or None):
            verdict = _judge(name, value, sealer, plain)
            counts[verdict] += 1
            num_bytes += len(value) if isinstance(value, bytes) else 0
            if verdict not in ("sound", "gone", "needs_hash_key"):
                bad.append((raw.decode(errors="replace"), verdict))
            progress.advance(task)
        progress.update(task, total=sum(counts.values()))
    lines: list[Any] = [
        f"{counts['sound']} of {sum(counts.values())} values sound, {size(num_bytes)} read."
    ]
    if not counts:
        where = f"namespace {namespace}" if namespace else "this server"
        lines.append(f"There are no values in {where}; `lmcache-connector ls` lists namespaces.")
    if unread := counts["needs_hash_key"]:
        lines.append(
            f"{unread} have seals made with a hash_key: give --kv-config with it to check them."
        )
    if bad:
        lines.append(table(("unsound value", "problem"), bad[:_MAX_SHOWN]))
        if len(bad) > _MAX_SHOWN:
            lines.append(f"and {len(bad) - _MAX_SHOWN} more; --json lists all.")
        lines.append("Each is a miss, and an engine that stores overwrites it then.")
    found = [{"name": name, "problem": verdict} for name, verdict in bad]
    document = {"ok": not bad, "values": dict(counts), "bytes": num_bytes, "unsound": found}
    report.emit(document, *lines)
    return FOUND_WRONG if bad else 0


def _judge(name: ValueName, value: bytes | Unreadable | None, sealer: Sealer, plain: Sealer) -> str:
    """``sound``, ``gone``, ``needs_hash_key``, or the problem's name as in the metrics."""
    if value is None:
        return "gone"
    if isinstance(value, Unreadable):
        return value.value
    try:
        header = decode_header(value[:HEADER_BYTES])
        place = (header.key, header.layer_start, header.layer_end, header.shard)
        if place != (name.key, name.layer_start, name.layer_end, name.shard):
            return ValueFault.FOREIGN.value
        if header.keyed and not sealer.keyed:
            return "needs_hash_key"
        check_whole_value(value, header, sealer if header.keyed else plain)
    except InvalidValueError as error:
        return error.fault.value
    return "sound"


# -- purge -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PurgeOptions:
    """Which values to remove, as typed; ``idle`` is for example ``12h``."""

    namespace: str | None
    everything: bool
    idle: str | None
    dry_run: bool
    yes: bool


def purge(report: Report, tier: RedisTierConfig, options: PurgeOptions) -> None:
    """Remove values in small batches."""
    idle_seconds = _seconds(options.idle)
    if (options.namespace is None) != options.everything:
        raise CliError("which values?", "give either --namespace NAME or --all")
    with open_admin(tier) as admin:
        found, are_aged = {}, set[bool]()
        for value in admin.values(options.namespace):
            are_aged.add(value.idle_seconds is not None)
            if idle_seconds is None or (value.idle_seconds or 0) >= idle_seconds:
                found[value.raw_name] = value.num_bytes
        if idle_seconds is not None and are_aged == {False}:
            raise CliError(
                "--idle: this server does not tell how long its values have been unused",
                "an LFU maxmemory-policy keeps no such times: leave out --idle, or set an LRU one",
            )
        num_bytes, removed, names = sum(found.values()), 0, iter(found)
        matching = f"{len(found)} values, {size(num_bytes)}"
        if found and not options.dry_run:
            if not options.yes:
                _ask(report, options.namespace, matching)
            while batch := list(islice(names, _BATCH)):
                removed += admin.unlink_anywhere(batch)
    said = f"{removed} of {matching} removed."
    report.emit(
        {
            "ok": True,
            "dry_run": options.dry_run,
            "matching_values": len(found),
            "matching_bytes": num_bytes,
            "removed_values": removed,
        },
        f"{matching}, would be removed." if options.dry_run else said,
    )


def _ask(report: Report, namespace: str | None, matching: str) -> None:
    if report.as_json:
        raise CliError("--json cannot ask for confirmation", "give --yes")
    where = f"namespace {namespace}" if namespace else "all namespaces"
    with suppress(typer.Abort):  # no terminal
        if typer.confirm(f"Remove {matching}, from {where}?", err=True):
            return
    raise CliError("nothing was removed", "--yes removes without a question", code=1)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise CliError(f"--idle {text!r} is not a duration", "for example 90s, 15m, 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]
