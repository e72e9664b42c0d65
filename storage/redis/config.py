"""The settings of the Redis tier, validated together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from lmcache_connector.kv_parts.part import part_of
from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Codec,
    Sealer,
    ValueHeader,
    stripe_header,
)
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries, Stripe
from lmcache_connector.storage.redis.client.url import RedisAddress, parse_redis_url

MIB = 1 << 20
_POSITIVE = (
    "connect_timeout_seconds",
    "read_timeout_seconds",
    "write_timeout_seconds",
    "num_connections",
    "window_bytes",
    "write_queue_bytes",
    "backoff_min_seconds",
    "backoff_max_seconds",
)


@dataclass(frozen=True)
class RedisTierConfig:
    """Raises a ``ValueError`` that lists every impossible value.

    ``url`` and ``hash_key`` are secrets, given as such and not as references; neither shows in
    ``repr``.
    """

    url: str = field(repr=False)
    namespace: str = "default"
    hash_key: bytes | None = field(default=None, repr=False)
    # Lifetime of a value in Redis; None keeps it until the server evicts it.
    ttl_seconds: float | None = None
    # Restart the lifetime on each hit (GETEX instead of GET; needs write permission).
    refresh_ttl: bool = False
    connect_timeout_seconds: float = 1.0
    # How long a server may go without sending a byte of its answer, or taking a byte of a write.
    read_timeout_seconds: float = 2.0
    write_timeout_seconds: float = 5.0
    # Reader threads, and at most as many writer threads. Each has one connection to each node.
    num_connections: int = 2
    # Requested and not yet received, per connection. The server may have to buffer as much; beyond
    # the size of its CPU's cache, more is only slower.
    window_bytes: int = 8 * MIB
    write_queue_bytes: int = 1024 * MIB
    # The largest stored value, header included.
    max_value_bytes: int = 4 * MIB
    codec: Codec = "none"
    backoff_min_seconds: float = 0.1
    backoff_max_seconds: float = 15.0

    def __post_init__(self) -> None:
        problems = [message for message in self._problems() if message]
        try:
            parse_redis_url(self.url)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))

    def _problems(self) -> list[str]:
        problems = [f"{name} must be positive" for name in _POSITIVE if not getattr(self, name) > 0]
        if not self.namespace or any(c in "{}" or not c.isprintable() for c in self.namespace):
            problems.append("namespace must be printable, not empty and without braces")
        if self.hash_key is not None and len(self.hash_key) < 16:
            problems.append("hash_key needs at least 16 bytes")
        if self.ttl_seconds is not None and self.ttl_seconds < 0.001:
            problems.append("ttl_seconds must be at least a millisecond")
        if self.refresh_ttl and self.ttl_seconds is None:
            problems.append("refresh_ttl needs ttl_seconds")
        if not 4096 <= self.max_value_bytes <= MAX_PAYLOAD_BYTES:
            problems.append(f"max_value_bytes must be 4096 to {MAX_PAYLOAD_BYTES}")
        return problems

    @cached_property
    def address(self) -> RedisAddress:
        return parse_redis_url(self.url)

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload of a value, by which stripes are cut."""
        return self.max_value_bytes - HEADER_BYTES

    @property
    def batch_bytes(self) -> int:
        """Sent together: two batches fill the window."""
        return self.window_bytes // 2

    @property
    def ttl_options(self) -> tuple[bytes, ...]:
        """``PX`` and the lifetime, or nothing."""
        if self.ttl_seconds is None:
            return ()
        return (b"PX", b"%d" % round(self.ttl_seconds * 1000))


@dataclass(frozen=True, slots=True)
class PartValues:
    """The values of one part of a chunk. ``stripes``: those that this rank reads or writes, in
    buffer order."""

    geometry: ChunkGeometry
    stripes: tuple[Stripe, ...]


@dataclass(frozen=True, slots=True)
class ValuePlan:
    """What all reads, or all writes, of a tier have in common. ``geometries``: of the chunks,
    ``parts``: what is moved of them, both of the model's parts in order."""

    config: RedisTierConfig
    geometries: PartGeometries
    parts: tuple[PartValues, ...]
    sealer: Sealer

    def of(self, key: bytes) -> PartValues:
        """What is stored under ``key``, which must name a part of the model."""
        return self.parts[part_of(key, len(self.parts))]

    def header(self, key: bytes, stripe: Stripe) -> ValueHeader:
        """Of the value that holds ``stripe`` of ``key``."""
        return stripe_header(self.of(key).geometry, stripe, key, keyed=self.sealer.keyed)
