"""Configuration of ``LMCacheP2PConnector``: its ``kv_connector_extra_config``.

As strict as the tiered connector's. The control port is vLLM's own ``kv_port``; rank r of an
instance listens r ports higher.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from lmcache_connector.config.model_digest import ModelDigest
from lmcache_connector.config.strict import Secret, StrictSettings, parse
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.errors import AddressError

_MIN_SECRET_BYTES = 16
_VLLM_OWN = ("kv_port", "kv_role", "engine_id", "kv_load_failure_policy")
_HINTS = dict.fromkeys(_VLLM_OWN, "vLLM's own: put it beside 'kv_connector'")


def _tuple_of_list(value: object) -> object:
    """JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def _long_enough(secret: SecretStr) -> SecretStr:
    if len(secret.get_secret_value().encode()) < _MIN_SECRET_BYTES:
        raise ValueError(f"must be at least {_MIN_SECRET_BYTES} bytes long")
    return secret


class P2PConfig(StrictSettings):
    """All settings. The table in docs/disaggregated.md documents them; a test compares the two."""

    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Where peers reach this instance. Loopback unless told otherwise."""
    bind_host: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Interface to listen on; none: ``host``."""
    data_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """First port of the data plane; rank r uses the r-th after it. 0: any free port."""
    peer_hosts: Annotated[tuple[str, ...], BeforeValidator(_tuple_of_list)] = ()
    """Hosts requests may name as peers: names, addresses, ``*.SUFFIX`` or networks in CIDR form.
    None: loopback if ``host`` is, else any. Without a name among them, nobody else is let in."""
    secret: Annotated[Secret, AfterValidator(_long_enough)] | None = None
    """Shared by all instances; authenticates them. May be ``env:NAME`` or ``file:PATH``."""
    insecure: bool = False
    """Without ``secret``: let anybody who reaches it hand over and fetch KV."""
    send_type: Literal["PUT", "PUT_ASYNC", "GET"] = "PUT_ASYNC"
    """For request ids that name both instances: push and wait, push, or let it be fetched."""
    transport: Literal["auto", "tcp", "nixl"] = "auto"
    """Data plane; ``auto`` is TCP without a ``secret``, and else NIXL on one machine and over RDMA,
    where it imports."""
    kv_buffer_size: Annotated[int, Field(gt=0, le=1 << 44)] = 1 << 30
    """KV on its way, per worker rank, bytes."""
    overflow_bytes: Annotated[int, Field(ge=0, le=1 << 44)] = 1 << 30
    """More of it, in (pinned) host memory, once that is full. Beyond it, new prompts wait."""
    checksum: bool = True
    """Verify what arrived before it enters the KV cache."""
    load_deadline_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Longest time a request waits for its KV before the rest is recomputed."""
    unknown_grace_seconds: Annotated[float, Field(ge=0, le=600)] = 1.0
    """How long a producer may not know a hand-over, or have sent it, without a byte arriving."""
    buffer_wait_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Longest time a prompt waits for buffer space before it is served without a hand-over."""
    stall_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    """Longest silence of a peer that owes bytes or an answer."""
    lease_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """How long KV is kept that nobody fetches, or whose request does not come."""
    router: Annotated[str, Field(pattern=r"^http://[A-Za-z0-9.\-\[\]:]{1,260}$")] | None = None
    """Proxy to register with, ``http://HOST:PORT``; none: no registration."""
    http_address: Annotated[str, Field(min_length=3, max_length=260)] | None = None
    """``HOST:PORT`` of this instance's own API, told to the router."""
    heartbeat_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    """Time between two signs of life to the router."""
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")] = "default"
    """Instances hand over only inside one namespace."""
    model_digest: ModelDigest = "full"
    """Identity of the weights: ``full``, a digest of every byte, or a name of your own."""
    shutdown_seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Longest time shutdown waits for transfers in progress."""

    @property
    def secret_bytes(self) -> bytes:
        """Empty without a secret."""
        return self.secret.get_secret_value().encode() if self.secret else b""

    def may_talk_to(self, peer: PeerAddress) -> bool:
        """Whether a request may make this instance connect there."""
        if self.peer_hosts:
            return any(_matches(peer.host, allowed) for allowed in self.peer_hosts)
        return peer.is_loopback or not self.is_loopback

    def may_be_dialled_from(self, address: str) -> bool:
        """Whether a peer may be there. Names in ``peer_hosts`` are not looked up: with one of them,
        anywhere."""
        return not self.peer_hosts or any(
            _matches(address, allowed) or not _is_network(allowed) for allowed in self.peer_hosts
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches this instance."""
        return PeerAddress(self.host, 1).is_loopback

    @property
    def largest_buffer_bytes(self) -> int:
        """The largest piece of memory that one prompt can have."""
        return max(self.kv_buffer_size, self.overflow_bytes)

    @property
    def keep_seconds(self) -> float:
        """How often a lease is renewed."""
        return min(5.0, self.lease_seconds / 4)

    def problems(self) -> Iterator[str]:
        try:
            is_local = PeerAddress(self.host, 1).is_loopback
            if self.bind_host is not None:
                is_local &= _is_loopback(self.bind_host)
            if not (is_local or self.secret or self.insecure):
                yield (
                    f"others can reach 'host' {self.host!r}: set a 'secret' that all instances "
                    "share; '\"insecure\": true' if the network is yours alone"
                )
        except AddressError as error:
            yield f"'host': {error}"
        if self.secret and not self.checksum:
            yield "'checksum' cannot be off with a 'secret': it is part of what is authenticated"
        if self.transport == "nixl" and not self.secret:
            yield "'transport' 'nixl' needs a 'secret': its peers read and write the KV cache"
        if (self.router is None) != (self.http_address is None):
            yield "'router' and 'http_address' go together: set both or neither"


def _matches(host: str, allowed: str) -> bool:
    """``allowed``: an entry of ``peer_hosts``."""
    if allowed.startswith("*."):
        return host.lower().endswith(allowed[1:].lower())
    if host.lower() == allowed.lower():
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(allowed, strict=False)
    except ValueError:  # one of the two is a name
        return False


def _is_network(allowed: str) -> bool:
    """Or one address."""
    try:
        ipaddress.ip_network(allowed, strict=False)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return PeerAddress(host, 1).is_loopback
    except AddressError:
        return False


def parse_p2p_config(extra_config: Mapping[str, Any]) -> P2PConfig:
    """Raises :class:`ConfigError` with one line per problem."""
    return parse(P2PConfig, extra_config, "kv_connector_extra_config", _HINTS)
