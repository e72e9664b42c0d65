"""Everything the Redis tier can be told, validated at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from lmcache_connector.storage.chunk_codec import HEADER_BYTES, MAX_PAYLOAD_BYTES
from lmcache_connector.storage.redis.url import RedisAddress, parse_redis_url

MIB = 1 << 20
_POSITIVE = (
    "connect_timeout_seconds",
    "read_timeout_seconds",
    "write_timeout_seconds",
    "num_connections",
    "window_bytes",
    "write_queue_bytes",
    "claim_seconds",
    "backoff_min_seconds",
    "backoff_max_seconds",
)


@dataclass(frozen=True)
class RedisTierConfig:
    """``url`` and ``hash_key`` are secrets, already resolved (see `secret.resolve_secret`); neither
    shows in ``repr``. Raises ``ValueError`` listing every impossible value."""

    url: str = field(repr=False)
    namespace: str = "default"
    hash_key: bytes | None = field(default=None, repr=False)
    # Lifetime of a value in Redis; None keeps it until the server evicts it.
    ttl_seconds: float | None = None
    # Start the lifetime anew on each hit (GETEX instead of GET; needs write permission).
    refresh_ttl: bool = False
    connect_timeout_seconds: float = 1.0
    # How long a server may go without giving, or taking, a single byte of an answer it owes.
    read_timeout_seconds: float = 2.0
    write_timeout_seconds: float = 5.0
    # Connections per server node for loads, and as many for writes, each driven by a thread of
    # its own.
    num_connections: int = 2
    # Requested and not yet received, per connection. It is also what the server may have to
    # buffer; beyond the size of a cache it only gets slower.
    window_bytes: int = 8 * MIB
    write_queue_bytes: int = 1024 * MIB
    # Of one stored value, header included.
    max_value_bytes: int = 4 * MIB
    # Writers of the same chunk elsewhere leave it to the first for this long.
    claim_seconds: float = 5.0
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
        """Of one value, without its header: what to cut stripes by."""
        return self.max_value_bytes - HEADER_BYTES

    @property
    def ttl_options(self) -> tuple[bytes, ...]:
        """``PX`` and the lifetime, or nothing."""
        if self.ttl_seconds is None:
            return ()
        return (b"PX", b"%d" % round(self.ttl_seconds * 1000))
