"""Configuration of ``LMCacheTieredConnector``: its ``kv_connector_extra_config``.

An unknown key, a wrong type or an impossible value stops the start with one message that lists
every problem and, for an unknown key, the nearest valid one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from lmcache_connector.config.model_digest import ModelDigest
from lmcache_connector.config.strict import Secret, StrictSettings, parse
from lmcache_connector.config.weights_label import read_weights_label
from lmcache_connector.errors import ConfigError
from lmcache_connector.peers.address import Address
from lmcache_connector.storage.chunk_codec import Codec
from lmcache_connector.storage.redis.config import MIB, RedisTierConfig

_LMCACHE_PREFIX = "lmcache."
_FOUND_AGAIN_SECONDS = 2.0
"""A peer is back, or new, for so long at most before it is asked."""
_GONE = {
    "share_after_reset": "no setting any more: weights are named by what is in memory, so leave it "
    "out",
}


def _long_enough(key: SecretStr) -> SecretStr:
    RedisTierConfig(url="redis://localhost", hash_key=key.get_secret_value().encode())
    return key


def _is_url(url: SecretStr) -> SecretStr:
    RedisTierConfig(url=url.get_secret_value())
    return url


def _is_address(text: str) -> str:
    Address.parse(text)
    return text


def _is_host(text: str) -> str:
    Address(text, 1).check()
    return text


def _tuple(value: object) -> object:
    """JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


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
    redis_admission: Literal["all", "reused", "worth"] = "all"
    """Write every chunk to Redis, or those that a second request of this instance has wanted, or
    those of prompts so long that loading them could be quicker than computing them."""
    redis_codec: Codec = "none"
    """Store values in Redis as they are, compressed without loss, or so where that pays."""
    redis_ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    """Lifetime of values in Redis; none leaves it to the server's eviction."""
    redis_ttl_refresh: bool = False
    """Renew the lifetime of values on every hit."""
    redis_connections: Annotated[int, Field(gt=0, le=64)] = 2
    """Connections per worker rank and server for reading, and at most as many for writing."""
    redis_timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    """Longest wait for Redis to connect or to answer one request."""
    redis_write_queue_mib: Annotated[int, Field(gt=0, le=1048576)] = 1024
    """Bytes waiting to be written to Redis; above it, writes are dropped."""
    prefetch_mib: Annotated[int, Field(ge=0, le=1048576)] = 512
    """Most bytes per worker rank that are fetched from Redis for requests that still wait."""
    peer_listen: Annotated[str, AfterValidator(_is_address)] | None = None
    """``HOST:PORT`` where rank 0 serves the chunks of its CPU tier, rank r r ports higher."""
    peer_secret: Secret | None = None
    """Who knows it may list what is served. On loopback alone; ``env:NAME`` or ``file:PATH``."""
    peer_insecure: bool = False
    """Serve beyond loopback without a ``hash_key``: who can name a chunk may read it."""
    peers: Annotated[tuple[str, ...], BeforeValidator(_are_addresses), Field(max_length=256)] = ()
    """Others to load from: their ``peer_listen``, ``HOST:PORT``, or ``dns:NAME:PORT`` for all
    addresses of a name. What they hold is taken for true, as what Redis holds is."""
    peer_host: Annotated[str, AfterValidator(_is_host)] | None = None
    """Where others reach this instance, if that is not the host of ``peer_listen``."""
    peer_hosts: Annotated[tuple[str, ...], BeforeValidator(_tuple), Field(max_length=256)] = ()
    """Hosts that requests may name to load from: names, addresses, ``*.SUFFIX`` or networks."""
    transfer_deadline_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Longest time a request waits until the instance it names has its KV."""
    lease_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """How long KV that another instance is to load is kept while nobody asks for it."""
    router: Annotated[str, Field(pattern=r"^http://[A-Za-z0-9.\-\[\]:]{1,260}$")] | None = None
    """Proxy to register with, ``http://HOST:PORT``; none: no registration."""
    router_secret: Secret | None = None
    """Signs registrations; ``env:NAME`` or ``file:PATH``."""
    http_address: Annotated[str, Field(min_length=3, max_length=260)] | None = None
    """``HOST:PORT`` of this instance's own API, told to the router."""
    heartbeat_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    """Time between two signs of life to the router."""
    load_deadline_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Longest time a request waits for a load before the rest is recomputed."""
    lookup_wait_seconds: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Time one scheduling step may wait for Redis to say what it holds."""
    lookup_deadline_seconds: Annotated[float, Field(gt=0, le=60)] = 0.1
    """Longest time a request may wait for that answer before Redis counts as a miss."""
    compute_or_load: Literal["auto", "always"] = "auto"
    """Load only what is quicker than recompute, or always."""
    require_cache_salt: bool = False
    """Neither load nor store requests without a ``cache_salt``."""
    self_test: bool = True
    """Store, load and compare a pattern at start; refuse to start on a mismatch."""
    audit_share: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Share of hits whose last chunk is computed as well and compared; 0 audits nothing."""
    weights_label: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """``file:PATH`` of a name for updated weights, by which engines of other parallel sizes share.
    Read at resets of the external cache."""
    model_digest: ModelDigest = "full"
    """Identity of the weights: ``full``, a digest of every byte, or a name of your own."""
    shutdown_seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Longest time shutdown waits for writes in progress."""

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

    @property
    def router_secret_bytes(self) -> bytes:
        """Empty without a secret."""
        return self.router_secret.get_secret_value().encode() if self.router_secret else b""

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
            num_connections=self.redis_connections,
            # What waits to be written stays in the CPU tier: leave that room to breathe.
            write_queue_bytes=min(self.redis_write_queue_mib * MIB, int(self.cpu_gib * 256 * MIB)),
        )

    @property
    def peer_addresses(self) -> tuple[Address, ...]:
        return tuple(Address.parse(text, may_be_dns=True) for text in self.peers)

    @property
    def is_reached_from_here_alone(self) -> bool:
        if self.peer_listen is None:
            return True
        listens = Address.parse(self.peer_listen)
        return listens.is_loopback and Address(self.peer_host or listens.host, 1).is_loopback

    def told_address(self, first_rank: int) -> Address | None:
        """Where others reach rank 0 of the engine with that first rank among all engines."""
        if self.peer_listen is None:
            return None
        listens = Address.parse(self.peer_listen)
        return Address(self.peer_host or listens.host, listens.port + first_rank)

    def trusts(self, peer: Address) -> bool:
        """Whether what comes from there, because a request says so, may be kept and passed on."""
        is_ours = self.hash_key is not None or peer.is_loopback
        return is_ours or any(peer == each for each in self.peer_addresses)

    def peer_tier_config(self) -> RedisTierConfig | None:
        """How values are read from peers, ``None`` without any: as from Redis."""
        if not (self.peers or self.peer_hosts):
            return None
        return RedisTierConfig(
            url="redis://peers",
            namespace=self.namespace,
            hash_key=self.hash_key_bytes,
            connect_timeout_seconds=self.redis_timeout_seconds,
            read_timeout_seconds=self.redis_timeout_seconds,
            num_connections=self.redis_connections,
            backoff_max_seconds=_FOUND_AGAIN_SECONDS,
        )

    @property
    def prefetch_bytes(self) -> int:
        """Fetched ahead and not yet used: never more than a quarter of the CPU tier, nor half of a
        tenant's share, or what comes for one request would push out what came for another."""
        share = min(0.25, self.tenant_share / 2)
        return min(self.prefetch_mib * MIB, int(self.cpu_gib * share * 1024 * MIB))

    def problems(self) -> Iterator[str]:
        try:
            read_weights_label(self.weights_label)
        except ConfigError as error:
            yield f"'weights_label': {error}"
        if (self.router is None) != (self.http_address is None):
            yield "'router' and 'http_address' go together: set both or neither"
        if self.router is not None and self.peer_listen is None:
            yield "'router': there is nothing to register without a 'peer_listen'"
        if not self.is_reached_from_here_alone:
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
    return parse(ConnectorConfig, own, "kv_connector_extra_config", _GONE, lmcache=lmcache)
