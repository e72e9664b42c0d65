"""The settings of a secondary tier of vLLM's ``OffloadingConnector``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from lmcache_connector.config.strict import ModelDigest, StrictSettings
from lmcache_connector.config.tiered import HashKey, LoadDeadline, Namespace, RedisUrl, Timeout
from lmcache_connector.storage.redis.config import RedisTierConfig


class TierSettings(StrictSettings):
    """The tiered connector's settings for Redis, with the same names, and vLLM's own."""

    redis_url: RedisUrl
    """Redis or Valkey; may be ``env:NAME`` or ``file:PATH``."""
    namespace: Namespace = "default"
    """Instances share only inside one namespace."""
    hash_key: HashKey | None = None
    """Secret that keys names and values; may be ``env:NAME`` or ``file:PATH``."""
    redis_ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    """Lifetime of values in Redis; none leaves it to the server's eviction."""
    redis_timeout_seconds: Timeout = 2.0
    """Longest time for Redis to connect or to answer one command."""
    load_deadline_seconds: LoadDeadline = 10.0
    """Longest time of a load; blocks missing after it are misses."""
    model_digest: ModelDigest = "full"
    """Identity of the weights: ``full``, a digest of every byte, or a name of your own."""
    locality: Literal["LOCAL", "REMOTE"] = "REMOTE"
    """Location of Redis in KV cache events."""
    enable_kv_events: bool = True
    """Publish stores as KV cache events, if vLLM publishes any."""

    @property
    def hash_key_bytes(self) -> bytes | None:
        """``None`` without a secret."""
        return self.hash_key.get_secret_value().encode() if self.hash_key else None

    def redis_tier_config(self) -> RedisTierConfig:
        """Raises ``ValueError`` for settings that conflict."""
        return RedisTierConfig(
            url=self.redis_url.get_secret_value(),
            namespace=self.namespace,
            hash_key=self.hash_key_bytes,
            ttl_seconds=self.redis_ttl_seconds,
            connect_timeout_seconds=self.redis_timeout_seconds,
            read_timeout_seconds=self.redis_timeout_seconds,
            write_timeout_seconds=self.redis_timeout_seconds,
        )

    def problems(self) -> Iterator[str]:
        try:
            self.redis_tier_config()
        except ValueError as error:
            yield f"the Redis tier: {error}"
