"""Names of values in Redis (pure).

A name is ``lmc:{<namespace>:<hex key of a chunk's part>}:<first layer>-<layer end>:<KV head>``. The
braces are a cluster hash tag: all values of a key share one slot, so one command can name them all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmcache_connector.storage.geometry import Stripe

_VALUE_NAME = re.compile(rb"lmc:\{([^{}]+):([0-9a-f]{64})\}:(\d{1,9})-(\d{1,9}):(\d{1,9})")


def chunk_tag(namespace: str, key: bytes) -> bytes:
    """The prefix shared by the names of all values of ``key``."""
    return f"lmc:{{{namespace}:{key.hex()}}}".encode()


def stripe_suffix(stripe: Stripe) -> bytes:
    """The rest of a value's name."""
    return b":%d-%d:%d" % (stripe.layer_start, stripe.layer_end, stripe.shard)


def probe_key(namespace: str) -> bytes:
    """The name of a key that never exists, for a probe that every server can answer."""
    return f"lmc:{{{namespace}:}}:probe".encode()


@dataclass(frozen=True, slots=True)
class ValueName:
    """A parsed name. ``key``: of a chunk's part; the layers are ``[layer_start, layer_end)``."""

    namespace: str
    key: bytes
    layer_start: int
    layer_end: int
    shard: int

    def is_in(self, namespace: str | None, key_prefix: str) -> bool:
        """Whether the value is of that namespace (None: any) and key prefix."""
        return namespace in (None, self.namespace) and self.key.hex().startswith(key_prefix)


def parse_value_name(name: bytes) -> ValueName | None:
    """None for a key that names no value."""
    match = _VALUE_NAME.fullmatch(name)
    if match is None:
        return None
    namespace, key, first, end, shard = match.groups()
    return ValueName(
        namespace.decode(errors="replace"),
        bytes.fromhex(key.decode()),
        int(first),
        int(end),
        int(shard),
    )


def scan_pattern(namespace: str | None, key_prefix: str = "") -> bytes:
    """A glob for SCAN that matches all values of one namespace (None: of all) with that prefix of
    the hexadecimal key, and maybe others: see `ValueName.is_in`."""
    if namespace is None:
        return f"lmc:{{*:{key_prefix}*".encode()
    escaped = re.sub(r"([\\*?\[\]])", r"\\\1", namespace)
    return f"lmc:{{{escaped}:{key_prefix}*".encode()
