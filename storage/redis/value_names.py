"""Names of values in Redis (pure).

``lmc:{<namespace>:<hex chunk key>}:<first layer>-<layer end>:<KV head>``: the braces are a cluster
hash tag, so all values of a chunk share one slot, one node and one multi-key command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmcache_connector.storage.geometry import Stripe

_VALUE_NAME = re.compile(rb"lmc:\{([^{}]+):([0-9a-f]{64})\}:(\d+)-(\d+):(\d+)")


def chunk_tag(namespace: str, key: bytes) -> bytes:
    """What all values of one chunk have in common, hash tag included."""
    return f"lmc:{{{namespace}:{key.hex()}}}".encode()


def stripe_suffix(stripe: Stripe) -> bytes:
    return b":%d-%d:%d" % (stripe.layer_start, stripe.layer_end, stripe.shard)


def claim_suffix(stripe: Stripe) -> bytes:
    """A short-lived claim says that a writer is at work on the values from ``stripe`` on."""
    return b":claim:%d:%d" % (stripe.layer_start, stripe.shard)


def probe_key(namespace: str) -> bytes:
    """A key that never exists, to ask for."""
    return f"lmc:{{{namespace}:}}:probe".encode()


@dataclass(frozen=True, slots=True)
class ValueName:
    """What the name of a value says: ``key`` is the chunk key, layers are ``[first, end)``."""

    namespace: str
    key: bytes
    layer_start: int
    layer_end: int
    shard: int


def parse_value_name(name: bytes) -> ValueName | None:
    """``None`` for a key that names no value: a claim, or someone else's."""
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
    """A glob for SCAN: all values of a namespace, or of all, whose chunk key begins in hex so."""
    if namespace is None:
        return f"lmc:{{*:{key_prefix}*".encode()
    escaped = re.sub(r"([\\*?\[\]])", r"\\\1", namespace)
    return f"lmc:{{{escaped}:{key_prefix}*".encode()
