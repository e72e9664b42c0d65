"""Configuration of ``LMCacheP2PConnector``: its ``kv_connector_extra_config``.

Strict as the tiered connector's. The control port is vLLM's own ``kv_port``; rank r of an instance
listens r ports higher.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from lmcache_connector.config.strict import resolve_secret
from lmcache_connector.errors import ConfigError
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.errors import AddressError

_MIN_SECRET_BYTES = 16
_VLLM_OWN = ("kv_port", "kv_role", "engine_id", "kv_load_failure_policy")


class P2PConfig(BaseModel):
    """All settings. The table in docs/disaggregated.md documents them; a test compares the two."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Where peers reach this instance. Loopback unless told otherwise."""
    bind_host: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Interface to listen on; none: ``host``."""
    data_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """First port of the data plane; rank r uses the r-th after it. 0: any free port."""
    peer_hosts: tuple[str, ...] = ()
    """Hosts requests may name as peers; none: loopback if ``host`` is, else any."""
    secret: SecretStr | None = None
    """Shared by all instances; authenticates them. May be ``env:NAME`` or ``file:PATH``."""
    send_type: Literal["PUT", "PUT_ASYNC", "GET"] = "PUT_ASYNC"
    """For request ids that name both instances: push and wait, push, or let it be fetched."""
    transport: Literal["auto", "tcp", "nccl"] = "auto"
    """Data plane; ``auto`` is NCCL between GPUs and TCP else."""
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
    model_digest: Annotated[str, Field(min_length=1, max_length=256)] = "sampled"
    """Identity of the weights: ``sampled``, ``full``, or a name of your own."""
    shutdown_seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Longest time shutdown waits for transfers in progress."""

    @field_validator("peer_hosts", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("secret", mode="before")
    @classmethod
    def _resolve_secret(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        secret = resolve_secret(value, os.environ)
        if len(secret.encode()) < _MIN_SECRET_BYTES:
            raise ValueError(f"must be at least {_MIN_SECRET_BYTES} bytes long")
        return SecretStr(secret)

    @property
    def secret_bytes(self) -> bytes:
        """Empty without a secret."""
        return self.secret.get_secret_value().encode() if self.secret else b""

    def may_talk_to(self, peer: PeerAddress) -> bool:
        """Whether a request may make this instance connect there."""
        if self.peer_hosts:
            return peer.host in self.peer_hosts
        return peer.is_loopback or not PeerAddress(self.host, 1).is_loopback


def parse_p2p_config(extra_config: Mapping[str, Any]) -> P2PConfig:
    """Raises :class:`ConfigError` with one line per problem."""
    valid = list(P2PConfig.model_fields)
    problems = [_unknown_key(key, valid) for key in extra_config if key not in valid]
    try:
        config = P2PConfig(**{k: v for k, v in extra_config.items() if k in valid})
        problems += _odd_combinations(config)
    except ValidationError as error:
        problems += [_explain(detail) for detail in error.errors(include_url=False)]
    if problems:
        raise ConfigError(
            "kv_connector_extra_config cannot be used:\n" + "\n".join(f"  - {p}" for p in problems)
        )
    return config


def _odd_combinations(config: P2PConfig) -> list[str]:
    problems = []
    try:
        PeerAddress(config.host, 1)
    except AddressError as error:
        problems.append(f"'host': {error}")
    if (config.router is None) != (config.http_address is None):
        problems.append("'router' and 'http_address' go together: set both or neither")
    return problems


def _unknown_key(key: str, valid: list[str]) -> str:
    if key in _VLLM_OWN:
        return f"{key!r} is vLLM's own: put it beside 'kv_connector'"
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(valid)}"
    return f"{key!r} is not a key: {hint}"


def _explain(detail: Any) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{name!r}: {message[0].lower()}{message[1:]}"
