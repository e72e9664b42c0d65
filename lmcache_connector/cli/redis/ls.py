"""``ls``: what lies in Redis, by namespace and by shape of model.

A value does not name its model, only its shape; two models of one shape are one line here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lmcache_connector.cli.report import Report, size, span
from lmcache_connector.cli.target import Target, open_admin
from lmcache_connector.storage.chunk_codec import InvalidValueError, ValueHeader, decode_header
from lmcache_connector.storage.redis.admin import ServerFacts, StoredValue


@dataclass(frozen=True, slots=True)
class Shape:
    """What values of one model and setting have in common."""

    dtype: str
    num_heads: int
    num_tokens: int
    content_width: int
    keyed: bool

    @classmethod
    def of(cls, header: ValueHeader) -> Shape:
        return cls(
            header.dtype, header.num_shards, header.num_tokens, header.content_width, header.keyed
        )

    def __str__(self) -> str:
        sealed = ", keyed" if self.keyed else ""
        return (
            f"{self.dtype}, {self.num_heads} KV heads of {self.content_width} B, "
            f"chunks of {self.num_tokens} tokens{sealed}"
        )


@dataclass(slots=True)
class Group:
    """The values of one namespace and shape. ``shape``: ``None`` for unsound headers."""

    namespace: str
    shape: Shape | None
    num_values: int = 0
    num_bytes: int = 0
    num_layers: int = 0
    chunks: set[bytes] = field(default_factory=set)
    idle: list[float | None] = field(default_factory=lambda: [None, None])
    ttl: list[float | None] = field(default_factory=lambda: [None, None])

    def add(self, value: StoredValue) -> None:
        self.num_values += 1
        self.num_bytes += value.num_bytes
        self.num_layers = max(self.num_layers, value.name.layer_end)
        self.chunks.add(value.name.key)
        self.idle = _widened(self.idle, value.idle_seconds)
        self.ttl = _widened(self.ttl, value.ttl_seconds)

    def as_json(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "namespace": self.namespace,
            "dtype": shape.dtype if shape else None,
            "layers": self.num_layers,
            "kv_heads": shape.num_heads if shape else None,
            "chunk_tokens": shape.num_tokens if shape else None,
            "keyed": shape.keyed if shape else None,
            "sound_headers": shape is not None,
            "chunks": len(self.chunks),
            "tokens": len(self.chunks) * shape.num_tokens if shape else None,
            "values": self.num_values,
            "bytes": self.num_bytes,
            "idle_seconds": self.idle,
            "ttl_seconds": self.ttl,
        }


def run(report: Report, target: Target, namespace: str | None) -> None:
    groups: dict[tuple[str, Shape | None], Group] = {}
    seen: set[bytes] = set()
    with open_admin(target.tier_config()) as admin:
        servers = [admin.facts(node) for node in admin.nodes()]
        for value in admin.values(namespace):
            if value.raw_name in seen:
                continue  # SCAN may repeat itself
            seen.add(value.raw_name)
            shape = _shape(value)
            key = (value.name.namespace, shape)
            groups.setdefault(key, Group(value.name.namespace, shape)).add(value)
    ordered = sorted(groups.values(), key=lambda g: (g.namespace, -g.num_bytes))
    if report.as_json:
        report.emit(
            {
                "ok": True,
                "servers": [asdict(facts) for facts in servers],
                "groups": [group.as_json() for group in ordered],
            }
        )
        return
    _print(report, servers, ordered)


def _print(report: Report, servers: list[ServerFacts], groups: list[Group]) -> None:
    for facts in servers:
        report.say(describe_server(facts))
    if not groups:
        report.say("No chunks here.")
        return
    rows = [
        (
            group.namespace,
            f"{group.num_layers} layers, {group.shape}" if group.shape else "unsound headers",
            str(len(group.chunks)),
            str(group.num_values),
            size(group.num_bytes),
            span(group.idle),
            span(group.ttl),
        )
        for group in groups
    ]
    columns = ("namespace", "model", "chunks ", "values ", "size ", "unused for", "ends in")
    report.table(columns, rows)


def describe_server(facts: ServerFacts) -> str:
    if facts.version is None:
        return f"{facts.node}: it does not say more"
    limit = size(facts.max_bytes) if facts.max_bytes else "no limit"
    return (
        f"{facts.node}: version {facts.version}, {size(facts.used_bytes or 0)} of {limit}, "
        f"{facts.policy}, {facts.evicted_keys} evicted"
    )


def _shape(value: StoredValue) -> Shape | None:
    try:
        return Shape.of(decode_header(value.header))
    except InvalidValueError:
        return None


def _widened(bounds: list[float | None], value: float | None) -> list[float | None]:
    """``[least, most]`` with one more value."""
    if value is None:
        return bounds
    low, high = bounds
    return [value if low is None else min(low, value), value if high is None else max(high, value)]
