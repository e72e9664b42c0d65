"""The settings of a secondary tier of vLLM's ``OffloadingConnector``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from lmcache_connector.config.model_digest import ModelDigest
from lmcache_connector.config.strict import StrictSettings
from lmcache_connector.config.tiered import HashKey, RedisUrl
from lmcache_connector.storage.redis.config import MIB, RedisTierConfig


class TierSettings(StrictSettings):
    """Those of the tiered connector that go with Redis, by the same names, and vLLM's."""

    redis_url: RedisUrl
    """Redis or Valkey; may be ``env:NAME`` or ``file:PATH``."""
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")] = "default"
    """Instances share only inside one namespace."""
    hash_key: HashKey | None = None
    """Secret that keys names and values; may be ``env:NAME`` or ``file:PATH``."""
    redis_ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    """Lifetime of values in Redis; none leaves it to the server's eviction."""
    redis_connections: Annotated[int, Field(gt=0, le=64)] = 2
    """Connections per server for reading, and at most as many for writing."""
    redis_timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    """Longest wait for Redis to connect or to answer one request."""
    redis_write_queue_mib: Annotated[int, Field(gt=0, le=1048576)] = 1024
    """Bytes waiting to be written to Redis; above it, writes are dropped."""
    load_deadline_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Longest time that a load takes before what is missing is a miss."""
    lookup_deadline_seconds: Annotated[float, Field(gt=0, le=60)] = 0.1
    """Longest time that a look-up takes before what is not known is a miss."""
    shutdown_seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Longest time shutdown waits for writes in progress."""
    model_digest: ModelDigest = "full"
    """Identity of the weights: ``full``, a digest of every byte, or a name of your own."""
    locality: Literal["LOCAL", "REMOTE"] = "REMOTE"
    """What KV cache events say of where Redis is."""
    enable_kv_events: bool = True
    """Publish what is stored, where vLLM publishes KV cache events at all."""

    @property
    def hash_key_bytes(self) -> bytes | None:
        """``None`` without a secret."""
        return self.hash_key.get_secret_value().encode() if self.hash_key else None

    def redis_tier_config(self) -> RedisTierConfig:
        """Raises ``ValueError`` for what does not go together."""
        return RedisTierConfig(
            url=self.redis_url.get_secret_value(),
            namespace=self.namespace,
            hash_key=self.hash_key_bytes,
            ttl_seconds=self.redis_ttl_seconds,
            connect_timeout_seconds=self.redis_timeout_seconds,
            read_timeout_seconds=self.redis_timeout_seconds,
            write_timeout_seconds=self.redis_timeout_seconds,
            num_connections=self.redis_connections,
            write_queue_bytes=self.redis_write_queue_mib * MIB,
        )

    def problems(self) -> Iterator[str]:
        try:
            self.redis_tier_config()
        except ValueError as error:
            yield f"the Redis tier: {error}"
