"""``kv_connector_extra_config`` of ``LMCacheTieredConnector`` and ``LMCacheP2PConnector``.

An unknown key, a wrong type or an impossible value stops the start with one message that lists
every problem and, for an unknown key, the nearest valid one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
)

from lmcache_connector.config import limits
from lmcache_connector.config.strict import (
    NAME_PATTERN,
    NO_HINTS,
    ModelDigest,
    Secret,
    StrictSettings,
    gone_value,
    parse,
    read_weights_label,
)
from lmcache_connector.errors import ConfigError
from lmcache_connector.net.address import Address
from lmcache_connector.plans import Tier
from lmcache_connector.storage.chunk_codec import Codec
from lmcache_connector.storage.redis.config import RedisTierConfig

_OF_LMCACHE = ("lmcache.numa_mode", "lmcache.local_cpu_use_hugepages")
_FOUND_AGAIN_SECONDS = 2.0
"""Longest pause between two tries to reach a peer that does not answer."""


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """Refuses values for which ``check`` raises ``ValueError``."""

    def checked(value: Any) -> Any:
        check(value)
        return value

    return AfterValidator(checked)


def _check_proxy(text: str) -> None:
    if not re.fullmatch(r"(http|tcp)://[A-Za-z0-9.\-\[\]:]{1,260}", text):
        raise ValueError(
            "must be http://HOST:PORT, without a path, or tcp://HOST:PORT for vLLM's router"
        )


def _tuple(value: object) -> object:
    """Convert a list, as JSON has no tuples."""
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list")
    return tuple(value)


def _peer_addresses(texts: Iterable[str]) -> tuple[Address, ...]:
    return tuple(Address.parse(text, may_be_dns=True) for text in texts)


HashKey = Annotated[
    Secret,
    _checked(
        lambda key: RedisTierConfig("redis://localhost", hash_key=key.get_secret_value().encode())
    ),
]
"""The secret from which names and seals of chunks are made, with or without Redis."""
RedisUrl = Annotated[Secret, _checked(lambda url: RedisTierConfig(url.get_secret_value()))]
"""URL of one server, of Sentinels or of a cluster."""
Namespace = Annotated[str, Field(pattern=NAME_PATTERN)]
Timeout = Annotated[float, Field(gt=0, le=600)]
LoadDeadline = Annotated[float, Field(gt=0, le=3600)]


class ConnectorConfig(StrictSettings):
    """All settings of the connector. Their docstrings become docs/settings.md by
    ``python -m tests.support.settings_page``."""

    chunk_size: Annotated[int, Field(gt=0, le=65536)] = 128
    """The unit of lookup, storage and eviction: a multiple of vLLM's block sizes, by default 128
    or the next multiple. Instances that share KV need the same. Redis: 64 MiB a layer and head."""
    cpu_gib: Annotated[float, Field(gt=0, le=65536)] = 8.0
    """Size of the CPU tier of one engine on one host; its worker ranks share it equally.
    Data-parallel engines have one each."""
    tenant_share: Annotated[float, Field(ge=0.01, le=1)] = 0.5
    """Fraction of the CPU tier guaranteed to each tenant (``cache_salt``; unsalted requests are one
    tenant). 1 turns the guarantee off: plain LRU."""
    pin_share: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    """Fraction of the CPU tier that requests may pin; a tenant up to ``tenant_share`` of it."""
    redis_url: RedisUrl | None = None
    """Address of the Redis or Valkey to share through. None: no Redis tier."""
    namespace: Namespace = "default"
    """Instances share only within one namespace. Letters, digits, ``_``, ``.`` and ``-``."""
    hash_key: HashKey | None = None
    """Shared secret, at least 16 bytes. Nobody who lacks it can compute names of chunks or forge
    stored values."""
    store_generated: bool = True
    """Store generated tokens too: the next turn of a conversation hits them."""
    window_interval: Annotated[int, Field(gt=0, le=10**9)] | None = None
    """Sliding-window models only: distance in tokens between positions where a hit may end.
    Smaller values find more partial hits and store more. None: 8 windows."""
    redis_admission: Annotated[
        Literal["all", "reused"], gone_value("worth", "use 'reused', or 'all'")
    ] = "all"
    """Chunks to write to Redis: ``all``, or only those that a second request of this instance has
    used."""
    redis_codec: Annotated[Codec, gone_value("auto", "use 'blosc2' or 'none'")] = "none"
    """Lossless compression of values in Redis. Every instance reads both forms."""
    redis_ttl_seconds: Annotated[int, Field(gt=0, le=10**9)] | None = None
    """Lifetime of values in Redis. None: the server's eviction policy decides."""
    redis_ttl_refresh: bool = False
    """Restart a value's lifetime when it is read, and now and then while it is hit in memory."""
    redis_timeout_seconds: Timeout = 2.0
    """Timeout of connecting to Redis or a peer, of a short reply, and of each 64 KiB of a value."""
    peer_listen: Annotated[str, _checked(Address.parse)] | None = None
    """``HOST:PORT`` where rank 0 serves the chunks of its CPU tier; rank r listens r ports higher.
    Beyond loopback it needs a ``hash_key`` or ``peer_insecure``."""
    peer_insecure: bool = False
    """Serve beyond loopback without a ``hash_key``: anyone who can name a chunk may read it."""
    host_sharing: bool = True
    """Share with the other engines of this user, host and namespace, which find each other."""
    host_folder: Annotated[str, Field(pattern="^/[^\x00]*$")] | None = None
    """Folder of mode 0700 where engines of one host find each other; engines that share need the
    same one. None: ``/run/user/ID/lmcache-connector``, or ``/tmp/lmcache-connector-ID``."""
    peers: Annotated[
        tuple[str, ...], BeforeValidator(_tuple), Field(max_length=256), _checked(_peer_addresses)
    ] = ()
    """Instances to load from: ``HOST:PORT`` of each, or ``dns:NAME:PORT`` for all addresses of a
    name."""
    peer_host: Annotated[str, _checked(lambda host: Address(host, 1).check())] | None = None
    """Host at which peers reach this instance, if it is not that of ``peer_listen``. Also sent
    to the router."""
    peer_hosts: Annotated[tuple[str, ...], BeforeValidator(_tuple), Field(max_length=256)] = ()
    """Hosts that requests may name to load from: names, addresses, ``*.SUFFIX``, or networks such
    as ``10.0.0.0/16``. An empty list: requests may name none."""
    transfer_deadline_seconds: LoadDeadline = 30.0
    """Longest wait of a request until the instance that it names has computed the KV."""
    lease_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """How long the KV of a KV transfer is kept after its reader last asked for it."""
    router: Annotated[str, _checked(_check_proxy)] | None = None
    """Proxy to register with while this instance's ``/health`` answers (``LMCacheP2PConnector``):
    ``http://HOST:PORT``, or ``tcp://HOST:PORT``, the discovery address of vLLM's router."""
    router_secret: Secret | None = None
    """Signs registrations at the proxy."""
    http_address: Annotated[str, _checked(Address.parse)] | None = None
    """``HOST:PORT`` of this instance's own API, for the proxy."""
    heartbeat_seconds: Timeout = 2.0
    """Time between two registrations."""
    load_deadline_seconds: LoadDeadline = 10.0
    """Longest time a load may take; chunks that have not arrived by then are recomputed."""
    compute_or_load: Literal["auto", "always"] = "auto"
    """``auto`` loads only hits that are faster to load than to recompute; ``always`` loads every
    hit."""
    loads_in_step: bool = True
    """Load hits from memory inside the step that uses them, where that is quick. The CPU tier then
    tells the scheduler before it evicts a chunk; if one is missing nevertheless, the engine
    stops with an error. No effect under Ray, where calls such as weight updates may
    overtake steps."""
    require_cache_salt: bool = False
    """Cache only requests that carry a ``cache_salt`` (multi-tenant serving)."""
    audit_share: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Fraction of hits that are audited: one chunk is recomputed and compared. The first hit of
    each kind is always audited. 0 turns audits off."""
    weights_label: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """``file:PATH``: a file with a name for updated weights, by which engines of different parallel
    sizes share KV; read at resets of the external cache. Engines of equal sizes need none."""
    model_digest: ModelDigest = "full"
    """How weights are identified: ``full`` is a digest of every byte, read once; any other value is
    used as their name."""

    lmcache_numa_mode: Annotated[Literal["auto"] | None, Field(alias=_OF_LMCACHE[0])] = None
    """LMCache's setting: ``auto`` puts the CPU tier into memory near the GPU."""
    lmcache_hugepages: Annotated[bool, Field(alias=_OF_LMCACHE[1])] = False
    """LMCache's setting: put the CPU tier into pages of 2 MiB, which the host must have reserved.
    GPUs only."""

    _ranks_on_host: int = PrivateAttr(default=1)

    @property
    def lmcache(self) -> dict[str, object]:
        """Settings for LMCache's own configuration, without those at their default."""
        named = zip(_OF_LMCACHE, (self.lmcache_numa_mode, self.lmcache_hugepages), strict=True)
        return {key.removeprefix("lmcache."): value for key, value in named if value}

    @property
    def wanted_chunk_size(self) -> int | None:
        """The user's chunk size; ``None`` if the model decides."""
        return self.chunk_size if "chunk_size" in self.model_fields_set else None

    def fitted(self, chunk_size: int, ranks_on_host: int) -> ConnectorConfig:
        """These settings with the model's chunk size, for one of ``ranks_on_host`` ranks."""
        fitted = self.model_copy(update={"chunk_size": chunk_size})
        fitted._ranks_on_host = ranks_on_host
        return fitted

    @property
    def rank_gib(self) -> float:
        """Each rank's share of ``cpu_gib``."""
        return self.cpu_gib / self._ranks_on_host

    @property
    def hash_key_bytes(self) -> bytes | None:
        """``None`` without a secret."""
        return self.hash_key.get_secret_value().encode() if self.hash_key else None

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
            write_queue_bytes=min(limits.MAX_QUEUED_BYTES, self._tier_bytes // 4),
        )

    @property
    def peer_addresses(self) -> tuple[Address, ...]:
        return _peer_addresses(self.peers)

    @property
    def is_reached_from_here_alone(self) -> bool:
        if self.peer_listen is None:
            return True
        listens = Address.parse(self.peer_listen)
        return listens.is_loopback and Address(self.peer_host or listens.host, 1).is_loopback

    def advertised_address(self, first_rank: int) -> Address | None:
        """Where others reach rank 0 of the engine whose first rank is ``first_rank``."""
        if self.peer_listen is None:
            return None
        listens = Address.parse(self.peer_listen)
        return Address(self.peer_host or listens.host, listens.port + first_rank)

    def trusts(self, peer: Address) -> bool:
        """Whether chunks loaded from ``peer``, which a request named, may be kept and passed on."""
        is_ours = self.hash_key is not None or peer.is_loopback
        return is_ours or peer in self.peer_addresses

    def peer_tier_config(self) -> RedisTierConfig | None:
        """Settings for reading values from peers, as from Redis; ``None`` without peers."""
        if not (self.peers or self.peer_hosts or self.host_sharing):
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
    def remote_tiers(self) -> tuple[Tier, ...]:
        """The configured tiers below the CPU tier, in the order in which loads try them."""
        has_peers = bool(self.peers) or self.host_sharing
        there = {Tier.PEER: has_peers, Tier.REDIS: self.redis_url is not None}
        return tuple(tier for tier, is_there in there.items() if is_there)

    @property
    def _tier_bytes(self) -> int:
        return int(self.rank_gib * 2**30)

    def problems(self) -> Iterator[str]:
        try:
            read_weights_label(self.weights_label)
        except ConfigError as error:
            yield f"'weights_label': {error}"
        if (self.router is None) != (self.http_address is None):
            yield "'router' and 'http_address' go together: set both or neither"
        if self.router is not None and self.peer_listen is None:
            yield "'router': registering at it needs a 'peer_listen'"
        is_open = self.hash_key is None and not self.is_reached_from_here_alone
        if is_open and not self.peer_insecure:
            yield (
                "'peer_listen': beyond loopback it needs a 'hash_key'; or set "
                "'peer_insecure', and anyone who reaches it may read every chunk that "
                "they can name"
            )
        if self.host_folder is not None and not self.host_sharing:
            yield "'host_folder': it has no effect without 'host_sharing': leave it out"
        try:
            self.redis_tier_config()
        except ValueError as error:
            yield f"the Redis tier: {error}"


def fit_chunk_size(wanted: int | None, block_size: int) -> int:
    """The chunk size in tokens; ``None``: the default, or the next size that holds whole blocks.
    Raises :class:`ConfigError`."""
    if wanted is None:
        default: int = ConnectorConfig.model_fields["chunk_size"].default
        return -(-default // block_size) * block_size
    if wanted % block_size:
        raise ConfigError(
            f"chunk_size {wanted} is not a multiple of the block size {block_size}: leave it out, "
            f"or set it to a multiple, or vLLM's --block-size to a divisor of {wanted}."
        )
    return wanted


def parse_config(
    extra_config: Mapping[str, Any], refused: Mapping[str, str] = NO_HINTS
) -> ConnectorConfig:
    """``refused``: settings without effect for the caller, with advice. Raises
    :class:`ConfigError` with one line per problem."""
    extra_config = {str(key): value for key, value in extra_config.items()}
    hints = {**_NOT_IN_TIERED, **refused}
    for key in extra_config:
        misspelt = difflib.get_close_matches(key, _OF_LMCACHE, n=1, cutoff=0.85)
        if key.startswith("lmcache.") and not misspelt:
            name = key.removeprefix("lmcache.")
            uses = (use for start, use in limits.LMCACHE.items() if name.startswith(start))
            use = next(uses, "leave it out")
            hints[key] = f"a setting of LMCache that has no place here: {use}"
    return parse(ConnectorConfig, extra_config, "kv_connector_extra_config", hints)


_OF_VLLM = dict.fromkeys(
    ("kv_port", "kv_role", "engine_id", "kv_load_failure_policy"),
    "vLLM's own setting: put it beside 'kv_connector'",
)
_NOT_IN_TIERED = {
    **limits.GONE,
    **_OF_VLLM,
    "host": "a setting of LMCacheP2PConnector: here it is 'peer_listen', or 'peer_host'",
    "bind_host": "a setting of LMCacheP2PConnector: here it is 'peer_listen'",
    "insecure": "a setting of LMCacheP2PConnector: here it is 'peer_insecure'",
}
_LOOPBACK = ("127.0.0.0/8", "::1", "localhost")
_PULLED = f"{limits.LEAVE_OUT}: decode instances fetch KV once it is computed"
_ONE_PORT = f"{limits.LEAVE_OUT}: KV goes over 'kv_port'"
_IN_CPU_GIB = "now part of 'cpu_gib', a quarter of which may wait to be fetched"
_NOT_IN_P2P = {
    "secret": "no longer a setting: set 'hash_key', the same everywhere, to key names and seals of "
    "KV, and 'router_secret' for a proxy that expects signed registrations",
    "send_type": _PULLED,
    "transport": _ONE_PORT,
    "data_port": _ONE_PORT,
    "kv_buffer_size": _IN_CPU_GIB,
    "overflow_bytes": _IN_CPU_GIB,
    "buffer_wait_seconds": f"{limits.LEAVE_OUT}: prompts do not wait for memory",
    "checksum": f"{limits.LEAVE_OUT}: everything is verified",
    "unknown_grace_seconds": f"{limits.LEAVE_OUT}: the grace period is 1 s",
    "stall_seconds": "now called 'redis_timeout_seconds'",
    "peer_listen": "called 'host', 'bind_host' and vLLM's 'kv_port' here",
    "peer_host": "called 'host' here",
    "peer_insecure": "called 'insecure' here",
    **_OF_VLLM,
}


_PORT = TypeAdapter(Annotated[int, Field(gt=0, lt=65536)])
"""Converts a number in a string, as vLLM does."""


def parse_p2p_config(
    extra_config: Mapping[str, Any], kv_port: object = 1, kv_role: str = "kv_producer"
) -> ConnectorConfig:
    """Raises :class:`ConfigError` with one line per problem."""
    known = {key: value for key, value in extra_config.items() if key not in _NOT_IN_P2P}
    problems = [f"{key!r} is {_NOT_IN_P2P[key]}" for key in extra_config if key in _NOT_IN_P2P]
    host = known.pop("host", "127.0.0.1")
    bind_host = known.pop("bind_host", None) or host
    try:
        port = _PORT.validate_python(kv_port)
    except ValidationError:
        port = 1
        problems.append("'kv_port': must be a port from 1 to 65535")
    is_text = isinstance(bind_host, str)
    listens: dict[str, Any] = {
        "peer_listen": str(Address(bind_host, port)) if is_text else bind_host,
        "peer_host": host,
        "peer_insecure": known.pop("insecure", False),
    }
    try:
        is_local = Address(host, 1).check().is_loopback
    except (TypeError, ValueError):
        is_local = True  # parse_config refuses the host
    if is_local:
        known.setdefault("peer_hosts", list(_LOOPBACK))
    elif kv_role != "kv_producer" and not known.get("peer_hosts"):
        problems.append(
            "'peer_hosts': list the hosts from which requests may have this instance load KV"
        )
    if kv_role == "kv_both" and str(known.get("router")).startswith("tcp://"):
        problems.append(
            "'router': vLLM's router does not support kv_role 'kv_both': set 'kv_producer' or "
            "'kv_consumer', or start the router with this instance's address as --prefill or "
            "--decode"
        )
    try:
        config = parse_config({**known, **listens})
    except ConfigError as error:
        text = str(error).replace("'peer_insecure'", "'insecure'").replace("'peer_host'", "'host'")
        names = "'bind_host'" if "bind_host" in extra_config else "'host'"
        problems += text.replace("'peer_listen'", names).splitlines()[1:]
    if problems:
        lines = "\n".join(f"  - {p.removeprefix('  - ')}" for p in problems)
        raise ConfigError(f"kv_connector_extra_config cannot be used:\n{lines}")
    return config


def check_settings(transfer: Mapping[str, Any], block_size: int | None = None) -> None:
    """Check the settings of each of our connectors in a ``kv_transfer_config`` of vLLM, also inside
    a ``MultiConnector``. A port or role that is missing is not checked. Raises
    :class:`ConfigError`, but not for what vLLM itself refuses."""
    connector, extra = transfer.get("kv_connector"), transfer.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        return
    if connector == "MultiConnector":
        children = extra.get("connectors")
        for each in children if isinstance(children, list) else ():
            if isinstance(each, Mapping):
                check_settings(each, block_size)
        return
    if connector == "LMCacheTieredConnector":
        config = parse_config(extra)
    elif connector == "LMCacheP2PConnector":
        beside = {key: transfer[key] for key in ("kv_port", "kv_role") if key in transfer}
        config = parse_p2p_config(extra, **beside)
    else:
        return
    if block_size:
        fit_chunk_size(config.wanted_chunk_size, block_size)
