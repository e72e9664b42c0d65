"""``inspect``: one chunk in Redis, value by value."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lmcache_connector.cli.report import CliError, Report, duration, size
from lmcache_connector.cli.target import Target, open_admin
from lmcache_connector.storage.chunk_codec import InvalidValueError, decode_header
from lmcache_connector.storage.redis.admin import StoredValue

_MAX_CHUNKS = 20


def run(report: Report, target: Target, namespace: str | None, chunk: str) -> None:
    values = _values(target, namespace, chunk)
    if report.as_json:
        report.emit({"ok": True, "values": [_as_json(value) for value in values]})
        return
    rows = [
        (
            value.name.key.hex()[:16],
            f"{value.name.layer_start} to {value.name.layer_end - 1}",
            str(value.name.shard),
            size(value.num_bytes),
            duration(value.idle_seconds),
            duration(value.ttl_seconds),
            _header(value)[0],
        )
        for value in values
    ]
    columns = ("chunk", "layers", "head ", "size ", "unused for", "ends in", "header")
    report.table(columns, rows)


def _values(target: Target, namespace: str | None, chunk: str) -> list[StoredValue]:
    """In order. Raises :class:`CliError` if no chunk, or too many, begin with these digits."""
    prefix = chunk.lower()
    if not prefix or len(prefix) > 64 or not set(prefix) <= set("0123456789abcdef"):
        raise CliError(
            f"{chunk!r} are not the first digits of a chunk key",
            "`ls` counts chunks; "
            "names in Redis are lmc:{NAMESPACE:KEY}:..., KEY being 64 hex digits",
        )
    with open_admin(target.tier_config()) as admin:
        values = {value.raw_name: value for value in admin.values(namespace, prefix)}
    chunks = sorted({(v.name.namespace, v.name.key) for v in values.values()})
    if not chunks:
        raise CliError(f"no chunk begins with {prefix}", "it may have been evicted", code=1)
    if len(chunks) > _MAX_CHUNKS:
        raise CliError(f"{len(chunks)} chunks begin with {prefix}", "give more digits")
    return sorted(values.values(), key=_order)


def _order(value: StoredValue) -> tuple[bytes, int, int]:
    return value.name.key, value.name.shard, value.name.layer_start


def _header(value: StoredValue) -> tuple[str, dict[str, Any] | None]:
    """For people, and for programs."""
    try:
        header = decode_header(value.header)
    except InvalidValueError as error:
        return f"unsound: {error}", None
    if header.key != value.name.key:
        return "unsound: it is another chunk's", None
    text = f"{header.dtype}, {header.num_tokens} tokens, head {header.shard} of {header.num_shards}"
    if header.compressed_bytes:
        text += f", compressed from {size(header.payload_bytes)}"
    return text, {**asdict(header), "key": header.key.hex()}


def _as_json(value: StoredValue) -> dict[str, Any]:
    text, header = _header(value)
    return {
        "name": value.raw_name.decode(errors="replace"),
        "namespace": value.name.namespace,
        "chunk": value.name.key.hex(),
        "bytes": value.num_bytes,
        "idle_seconds": value.idle_seconds,
        "ttl_seconds": value.ttl_seconds,
        "header": header,
        "problem": None if header is not None else text,
    }
