"""The settings of the Redis tier, validated together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    Codec,
    Sealer,
    ValueHeader,
    stripe_header,
)
from lmcache_connector.storage.geometry import PartGeometries, Stripe
from lmcache_connector.storage.redis.client.url import RedisAddress, parse_redis_url
from lmcache_connector.storage.redis.value_names import chunk_tag, stripe_suffix

MIB = 1 << 20


@dataclass(frozen=True)
class RedisTierConfig:
    """Raises a ``ValueError`` that lists all invalid settings.

    ``url`` and ``hash_key`` are the secrets themselves, not references; ``repr`` omits them.
    """

    url: str = field(repr=False)
    namespace: str = "default"
    hash_key: bytes | None = field(default=None, repr=False)
    # Lifetime of a value in Redis; None keeps it until the server evicts it.
    ttl_seconds: float | None = None
    # Restart the lifetime of values read or put again. GETEX and PEXPIRE need rights of their own.
    refresh_ttl: bool = False
    connect_timeout_seconds: float = 1.0
    # How long a server may take for a short reply, or for each 64 KiB of a value read or written.
    read_timeout_seconds: float = 2.0
    write_timeout_seconds: float = 5.0
    # Reader threads, each with one connection to each node, and writer threads (see `tier`).
    num_connections: int = 2
    # About how many bytes may be requested and not yet received, per connection. The server may
    # buffer as much: more than fits its CPU's cache is slower.
    window_bytes: int = 8 * MIB
    write_queue_bytes: int = 1024 * MIB
    # Values are cut to this size, header included; one with a single layer may be larger.
    max_value_bytes: int = 4 * MIB
    codec: Codec = "none"
    backoff_min_seconds: float = 0.1
    backoff_max_seconds: float = 15.0

    def __post_init__(self) -> None:
        if problems := "; ".join(self._problems()):
            raise ValueError(problems)

    def _problems(self) -> Iterator[str]:
        if not self.namespace or any(c in "{}" or not c.isprintable() for c in self.namespace):
            yield "namespace must be printable, not empty and without braces"
        if self.hash_key is not None and len(self.hash_key) < 16:
            yield "hash_key needs at least 16 bytes"
        if self.refresh_ttl and self.ttl_seconds is None:
            yield "'redis_ttl_refresh' needs 'redis_ttl_seconds'"
        try:
            parse_redis_url(self.url)
        except ValueError as error:
            yield str(error)

    @cached_property
    def address(self) -> RedisAddress:
        return parse_redis_url(self.url)

    @property
    def max_payload_bytes(self) -> int:
        """Stripes are cut to this size; one with a single layer may be larger."""
        return self.max_value_bytes - HEADER_BYTES

    @property
    def batch_bytes(self) -> int:
        """Bytes per batch: two batches fill the window."""
        return self.window_bytes // 2

    @property
    def ttl_options(self) -> tuple[bytes, ...]:
        if self.ttl_seconds is None:
            return ()
        return (b"PX", b"%d" % round(self.ttl_seconds * 1000))


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One value to be read, of chunk number ``chunk`` of a read. ``payload``: its place in the
    chunk's buffer."""

    chunk: int
    name: bytes
    expected: ValueHeader
    payload: memoryview


class ValuePlan:
    """Stripes, headers and seals of a tier's values. ``geometries``: of the share of a chunk that
    this rank reads or writes."""

    def __init__(self, config: RedisTierConfig, geometries: PartGeometries) -> None:
        self.config = config
        self.geometries = geometries
        self.sealer = Sealer(config.hash_key)
        self._stripes = [part.stripes(config.max_payload_bytes) for part in geometries.parts]

    def stripes_of(self, key: bytes) -> tuple[Stripe, ...]:
        """Stripes of ``key``, which must name a part of the model, in buffer order."""
        return self._stripes[self.geometries.index_of(key)]

    def values(self, chunk: int, key: bytes, buffer: memoryview) -> Iterator[Value]:
        """The values of chunk number ``chunk``, in buffer order."""
        for stripe in self.stripes_of(key):
            payload = buffer[stripe.offset : stripe.offset + stripe.num_bytes]
            yield Value(chunk, self.name(key, stripe), self.header(key, stripe), payload)

    def name(self, key: bytes, stripe: Stripe) -> bytes:
        """The name of the value that holds ``stripe`` of ``key``."""
        return chunk_tag(self.config.namespace, key) + stripe_suffix(stripe)

    def header(self, key: bytes, stripe: Stripe) -> ValueHeader:
        return stripe_header(self.geometries.of(key), stripe, key, keyed=self.sealer.keyed)
