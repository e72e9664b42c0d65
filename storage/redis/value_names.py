"""Names of values in Redis (pure).

A name is ``lmc:{<namespace>:<hex chunk key>}:<first layer>-<layer end>:<KV head>``. The braces are
a cluster hash tag: all values of a chunk share one slot and one node, and one command can name them
all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmcache_connector.storage.geometry import Stripe

_VALUE_NAME = re.compile(rb"lmc:\{([^{}]+):([0-9a-f]{64})\}:(\d+)-(\d+):(\d+)")


def chunk_tag(namespace: str, key: bytes) -> bytes:
    """The part of the name that all values of one chunk share."""
    return f"lmc:{{{namespace}:{key.hex()}}}".encode()


def stripe_suffix(stripe: Stripe) -> bytes:
    """The rest of a value's name."""
    return b":%d-%d:%d" % (stripe.layer_start, stripe.layer_end, stripe.shard)


def probe_key(namespace: str) -> bytes:
    """The name of a key that never exists, for a question that any server can answer."""
    return f"lmc:{{{namespace}:}}:probe".encode()


@dataclass(frozen=True, slots=True)
class ValueName:
    """A name in parts. ``key`` is the chunk key; the layers are ``[layer_start, layer_end)``."""

    namespace: str
    key: bytes
    layer_start: int
    layer_end: int
    shard: int

    def is_in(self, namespace: str | None, key_prefix: str) -> bool:
        """Whether it is of that namespace, or there is none, and of a key that begins so."""
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
    """A glob for SCAN that finds all values of one namespace, or of all, whose hexadecimal chunk
    key begins with ``key_prefix``, and maybe others: see `ValueName.is_in`."""
    if namespace is None:
        return f"lmc:{{*:{key_prefix}*".encode()
    escaped = re.sub(r"([\\*?\[\]])", r"\\\1", namespace)
    return f"lmc:{{{escaped}:{key_prefix}*".encode()
