"""Configuration of ``LMCacheTieredConnector``: its ``kv_connector_extra_config``.

An unknown key, a wrong type or an impossible value stops the start with one message that lists
every problem and, for an unknown key, the nearest valid one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from lmcache_connector.config import limits
from lmcache_connector.config.model_digest import ModelDigest
from lmcache_connector.config.strict import Secret, StrictSettings, gone_value, parse
from lmcache_connector.config.weights_label import read_weights_label
from lmcache_connector.errors import ConfigError
from lmcache_connector.peers.address import Address
from lmcache_connector.storage.chunk_codec import Codec
from lmcache_connector.storage.redis.config import RedisTierConfig

_LMCACHE_PREFIX = "lmcache."
_FOUND_AGAIN_SECONDS = 2.0
"""A peer is back, or new, for so long at most before it is asked."""


def _long_enough(key: SecretStr) -> SecretStr:
    RedisTierConfig(url="redis://localhost", hash_key=key.get_secret_value().encode())
    return key


def _is_url(url: SecretStr) -> SecretStr:
    RedisTierConfig(url=url.get_secret_value())
    return url


def _is_address(text: str) -> str:
    Address.parse(text)
    return text


def _are_addresses(texts: object) -> object:
    """JSON has no tuples."""
    if isinstance(texts, list):
        for text in texts:
            Address.parse(str(text), may_be_dns=True)
        return tuple(texts)
    return texts


HashKey = Annotated[Secret, AfterValidator(_long_enough)]
"""Keys names and values, in Redis and without it."""
RedisUrl = Annotated[Secret, AfterValidator(_is_url)]
"""Of one server, Sentinels or a cluster."""


class ConnectorConfig(StrictSettings):
    """All settings of the connector. The README's table documents them; a test compares the two."""

    chunk_size: Annotated[int, Field(gt=0, le=65536)] = 128
    """Tokens per chunk, a multiple of vLLM's block sizes; the default grows to the next one."""
    cpu_gib: Annotated[float, Field(gt=0, le=65536)] = 8.0
    """CPU tier capacity per worker rank, GiB."""
    tenant_share: Annotated[float, Field(ge=0.01, le=1)] = 0.5
    """Share of the CPU tier that one ``cache_salt`` keeps while others want the room."""
    pin_share: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    """Share of the CPU tier that requests may pin, each salt up to ``tenant_share`` of it."""
    redis_url: RedisUrl | None = None
    """Redis or Valkey; none leaves the CPU tier alone. May be ``env:NAME`` or ``file:PATH``."""
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")] = "default"
    """Instances share chunks only inside one namespace."""
    hash_key: HashKey | None = None
    """Secret that keys chunk keys and values. May be ``env:NAME`` or ``file:PATH``."""
    store_generated: bool = True
    """Store generated tokens too, for the next turn of a conversation."""
    window_interval: Annotated[int, Field(gt=0)] | None = None
    """Most tokens between two places where a hit may end on stored windows; none: 8 windows."""
    redis_admission: Annotated[
        Literal["all", "reused"], gone_value("worth", "use 'reused', or 'all'")
    ] = "all"
    """Write every chunk to Redis, or those that a second request of this instance has wanted."""
    redis_codec: Annotated[Codec, gone_value("auto", "use 'blosc2' or 'none'")] = "none"
    """Store values in Redis as they are, or compressed without loss."""
    redis_ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    """Lifetime of values in Redis; none leaves it to the server's eviction."""
    redis_ttl_refresh: bool = False
    """Renew the lifetime of values on every hit."""
    redis_timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    """Longest wait for Redis to connect or to answer one request."""
    prefetch: bool = True
    """Fetch ahead from Redis for requests that still wait in vLLM's queue."""
    peer_listen: Annotated[str, AfterValidator(_is_address)] | None = None
    """``HOST:PORT`` where rank 0 serves the chunks of its CPU tier, rank r r ports higher."""
    peer_secret: Secret | None = None
    """Who knows it may list what is served. On loopback alone; ``env:NAME`` or ``file:PATH``."""
    peer_insecure: bool = False
    """Serve beyond loopback without a ``hash_key``: who can name a chunk may read it."""
    peers: Annotated[tuple[str, ...], BeforeValidator(_are_addresses), Field(max_length=256)] = ()
    """Others to load from: their ``peer_listen``, ``HOST:PORT``, or ``dns:NAME:PORT`` for all
    addresses of a name. What they hold is taken for true, as what Redis holds is."""
    load_deadline_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Longest time a request waits for a load before the rest is recomputed."""
    compute_or_load: Literal["auto", "always"] = "auto"
    """Load only what is quicker than recompute, or always."""
    require_cache_salt: bool = False
    """Neither load nor store requests without a ``cache_salt``."""
    audit_share: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Share of hits whose last chunk is computed as well and compared; 0 audits nothing."""
    weights_label: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """``file:PATH`` of a name for updated weights, by which engines of other parallel sizes share.
    Read at resets of the external cache."""
    model_digest: ModelDigest = "full"
    """Identity of the weights: ``full``, a digest of every byte, or a name of your own."""

    lmcache: dict[str, Any] = Field(default_factory=dict)
    """``lmcache.NAME`` keys, handed to LMCache's own configuration."""

    @property
    def wanted_chunk_size(self) -> int | None:
        """``None`` if the user leaves it to the model."""
        return self.chunk_size if "chunk_size" in self.model_fields_set else None

    def with_chunk_size(self, chunk_size: int) -> ConnectorConfig:
        """What the model was found to need."""
        return self.model_copy(update={"chunk_size": chunk_size})

    @property
    def hash_key_bytes(self) -> bytes | None:
        """``None`` without a secret."""
        return self.hash_key.get_secret_value().encode() if self.hash_key else None

    @property
    def peer_secret_bytes(self) -> bytes | None:
        """``None`` without a secret."""
        return self.peer_secret.get_secret_value().encode() if self.peer_secret else None

    def redis_tier_config(self) -> RedisTierConfig | None:
        """Settings of the Redis tier, ``None`` without one. Raises ``ValueError``."""
        if self.redis_url is None:
            return None
        return RedisTierConfig(
            url=self.redis_url.get_secret_value(),
            namespace=self.namespace,
            hash_key=self.hash_key_bytes,
            codec=self.redis_codec,
            ttl_seconds=self.redis_ttl_seconds,
            refresh_ttl=self.redis_ttl_refresh,
            connect_timeout_seconds=self.redis_timeout_seconds,
            read_timeout_seconds=self.redis_timeout_seconds,
            write_timeout_seconds=self.redis_timeout_seconds,
            write_queue_bytes=min(limits.MAX_QUEUED_BYTES, self._tier_bytes // 4),
        )

    @property
    def peer_addresses(self) -> tuple[Address, ...]:
        return tuple(Address.parse(text, may_be_dns=True) for text in self.peers)

    def peer_tier_config(self) -> RedisTierConfig | None:
        """How values are read from peers, ``None`` without any: as from Redis."""
        if not self.peers:
            return None
        return RedisTierConfig(
            url="redis://peers",
            namespace=self.namespace,
            hash_key=self.hash_key_bytes,
            connect_timeout_seconds=self.redis_timeout_seconds,
            read_timeout_seconds=self.redis_timeout_seconds,
            backoff_max_seconds=_FOUND_AGAIN_SECONDS,
        )

    @property
    def prefetch_bytes(self) -> int:
        """Fetched ahead and not yet used, per rank."""
        share = min(0.25, self.tenant_share / 2)
        return min(limits.MAX_PREFETCH_BYTES, int(self._tier_bytes * share)) if self.prefetch else 0

    @property
    def _tier_bytes(self) -> int:
        return int(self.cpu_gib * 2**30)

    def problems(self) -> Iterator[str]:
        try:
            read_weights_label(self.weights_label)
        except ConfigError as error:
            yield f"'weights_label': {error}"
        if self.peer_listen is not None and not Address.parse(self.peer_listen).is_loopback:
            if self.hash_key is None and not self.peer_insecure:
                yield (
                    "'peer_listen': beyond loopback it needs a 'hash_key', or 'peer_insecure' if "
                    "whoever reaches it may read every chunk that they can name"
                )
            if self.peer_secret is not None:
                yield "'peer_secret': beyond loopback it would be sent in clear text"
        try:
            self.redis_tier_config()
        except ValueError as error:
            yield f"the Redis tier: {error}"


def parse_config(extra_config: Mapping[str, Any]) -> ConnectorConfig:
    """Raises :class:`ConfigError` with one line per problem."""
    own, lmcache = {}, {}
    for key, value in extra_config.items():
        if key.startswith(_LMCACHE_PREFIX):
            lmcache[key.removeprefix(_LMCACHE_PREFIX)] = value
        else:
            own[key] = value
    return parse(ConnectorConfig, own, "kv_connector_extra_config", limits.GONE, lmcache=lmcache)
