"""The settings of a secondary tier of vLLM's ``OffloadingConnector``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from lmcache_connector.config.tiered import ConnectorConfig

KEYS = (
    *("redis_url", "namespace", "hash_key", "redis_ttl_seconds", "redis_timeout_seconds"),
    *("load_deadline_seconds", "model_digest", "locality", "enable_kv_events"),
)
"""The tiered connector's settings for Redis, with the same names and meanings, and vLLM's own."""


class TierSettings(ConnectorConfig):
    """Only :data:`KEYS` may be given."""

    locality: Literal["LOCAL", "REMOTE"] = "REMOTE"
    """Location of Redis in KV cache events."""
    enable_kv_events: bool = True
    """Publish stores as KV cache events, if vLLM publishes any."""

    def problems(self) -> Iterator[str]:
        if self.redis_url is None:
            yield "'redis_url': field required"
        yield from super().problems()
