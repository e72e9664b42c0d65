"""Configuration: the ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``.

Strict and typed: an unknown key, a wrong type or an impossible value stops the start with one
message that lists every problem and, for an unknown key, the nearest valid one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from lmcache_connector.config.strict import resolve_secret
from lmcache_connector.errors import ConfigError
from lmcache_connector.storage.redis.config import MIB, RedisTierConfig

_LMCACHE_PREFIX = "lmcache."


class ConnectorConfig(BaseModel):
    """All settings of the connector. The README's table documents them; a test compares the two."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    chunk_size: Annotated[int, Field(gt=0, le=65536)] = 128
    """Tokens per chunk, a multiple of vLLM's block size."""
    cpu_gib: Annotated[float, Field(gt=0, le=65536)] = 8.0
    """CPU tier capacity per worker rank, GiB."""
    redis_url: SecretStr | None = None
    """Redis or Valkey; none leaves the CPU tier alone. May be ``env:NAME`` or ``file:PATH``."""
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")] = "default"
    """Instances share chunks only inside one namespace."""
    hash_key: SecretStr | None = None
    """Secret that keys chunk keys and values. May be ``env:NAME`` or ``file:PATH``."""
    store_generated: bool = True
    """Store generated tokens too, for the next turn of a conversation."""
    redis_admission: Literal["all", "reused"] = "all"
    """Write every chunk to Redis, or those that a second request of this instance has wanted."""
    redis_ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    """Lifetime of values in Redis; none leaves it to the server's eviction."""
    redis_ttl_refresh: bool = False
    """Renew the lifetime of values on every hit."""
    redis_connections: Annotated[int, Field(gt=0, le=64)] = 2
    """Connections per worker rank for each direction."""
    redis_timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    """Longest wait for Redis to connect or to answer one request."""
    redis_write_queue_mib: Annotated[int, Field(gt=0, le=1048576)] = 1024
    """Bytes waiting to be written to Redis; above it, writes are dropped."""
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
    model_digest: Annotated[str, Field(min_length=1, max_length=256)] = "sampled"
    """Identity of the weights: ``sampled``, ``full``, or a name of your own."""
    shutdown_seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Longest time shutdown waits for writes in progress."""

    lmcache: dict[str, Any] = Field(default_factory=dict)
    """``lmcache.NAME`` keys, handed to LMCache's own configuration."""

    @field_validator("redis_url", "hash_key", mode="before")
    @classmethod
    def _resolve_secret(cls, value: object) -> object:
        """``env:NAME`` and ``file:PATH`` are looked up, anything else is the secret itself."""
        if not isinstance(value, str):
            return value
        if not value:
            raise ValueError("must not be empty")
        return SecretStr(resolve_secret(value, os.environ))

    @property
    def hash_key_bytes(self) -> bytes | None:
        return self.hash_key.get_secret_value().encode() if self.hash_key else None

    def redis_tier_config(self) -> RedisTierConfig | None:
        """Settings of the Redis tier, ``None`` without one. Raises ``ValueError``."""
        if self.redis_url is None:
            return None
        return RedisTierConfig(
            url=self.redis_url.get_secret_value(),
            namespace=self.namespace,
            hash_key=self.hash_key_bytes,
            ttl_seconds=self.redis_ttl_seconds,
            refresh_ttl=self.redis_ttl_refresh,
            connect_timeout_seconds=self.redis_timeout_seconds,
            read_timeout_seconds=self.redis_timeout_seconds,
            write_timeout_seconds=self.redis_timeout_seconds,
            num_connections=self.redis_connections,
            # What waits to be written stays in the CPU tier: leave that room to breathe.
            write_queue_bytes=min(self.redis_write_queue_mib * MIB, int(self.cpu_gib * 256 * MIB)),
        )


def parse_config(extra_config: Mapping[str, Any]) -> ConnectorConfig:
    """Raises :class:`ConfigError` with one line per problem."""
    own = {k: v for k, v in extra_config.items() if not k.startswith(_LMCACHE_PREFIX)}
    problems = [_unknown_key(key) for key in own if key not in _valid_keys()]
    lmcache = {
        key.removeprefix(_LMCACHE_PREFIX): value
        for key, value in extra_config.items()
        if key.startswith(_LMCACHE_PREFIX)
    }
    known = {key: value for key, value in own.items() if key in _valid_keys()}
    try:
        config = ConnectorConfig(**known, lmcache=lmcache)
        config.redis_tier_config()
    except ValidationError as error:
        problems += [_explain(detail) for detail in error.errors(include_url=False)]
    except ValueError as error:
        problems.append(f"the Redis tier: {error}")
    if problems:
        raise ConfigError(
            "kv_connector_extra_config cannot be used:\n" + "\n".join(f"  - {p}" for p in problems)
        )
    return config


def _valid_keys() -> list[str]:
    return [name for name in ConnectorConfig.model_fields if name != "lmcache"]


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key, _valid_keys(), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(_valid_keys())}"
    return f"{key!r} is not a key: {hint}"


def _explain(detail: Any) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{name!r}: {message[0].lower()}{message[1:]}"
