"""``check`` for ``LMCacheTieredConnector``: its settings, this host's memory, Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lmcache_connector.cli.check.finding import Finding
from lmcache_connector.cli.check.host import check_memory, check_versions
from lmcache_connector.cli.redis.ls import describe_server
from lmcache_connector.cli.redis.round_trip import RoundTrip
from lmcache_connector.cli.report import size
from lmcache_connector.cli.target import connector_config, open_admin
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.config.warnings import settings_warnings
from lmcache_connector.storage.redis.admin import RedisAdmin, ServerFacts
from lmcache_connector.storage.redis.config import RedisTierConfig

_CHUNKS = 4
_WAIT_SECONDS = 10.0


def findings(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Raises ``CliError`` for settings that the engine would refuse, and if Redis is away."""
    config = connector_config(document)
    yield Finding("settings", "ok", _settings(config))
    for warning in settings_warnings(config, document.get("kv_role")):
        yield Finding("settings", "warning", warning.problem, warning.remedy)
    yield check_versions()
    yield check_memory("cpu tier", "cpu_gib", int(config.cpu_gib * 2**30), 2**30)
    tier = config.redis_tier_config()
    if tier is None:
        yield Finding("redis", "ok", "none is configured")
    else:
        yield from _check_redis(tier)


def _settings(config: ConnectorConfig) -> str:
    parts = [
        f"namespace {config.namespace}",
        f"chunks of {config.chunk_size} tokens",
        f"CPU tier {config.cpu_gib:g} GiB per rank",
        f"hash_key {'set' if config.hash_key else 'not set'}",
        f"compute_or_load {config.compute_or_load}",
        f"audit_share {config.audit_share:g}",
    ]
    return ", ".join(parts)


def _check_redis(tier: RedisTierConfig) -> list[Finding]:
    started = time.monotonic()
    with open_admin(tier) as admin:
        nodes = admin.nodes()
        seconds = time.monotonic() - started
        text = f"{tier.address}: {len(nodes)} server{'s' if len(nodes) > 1 else ''}"
        return [
            Finding("redis connection", "ok", text, seconds=seconds),
            *(_judge_server(admin.facts(node), tier) for node in nodes),
            *_round_trip(admin, tier),
        ]


def _judge_server(facts: ServerFacts, tier: RedisTierConfig) -> Finding:
    text = describe_server(facts)
    if facts.version is None:
        return Finding("redis server", "warning", text, "allow this user +info to check its limits")
    endless = not facts.max_bytes and tier.ttl_seconds is None
    if endless or facts.policy == "noeviction":
        hint = "set maxmemory, and maxmemory-policy allkeys-lru, or redis_ttl_seconds"
        return Finding("redis server", "warning", text, hint)
    return Finding("redis server", "ok", text)


def _round_trip(admin: RedisAdmin, tier: RedisTierConfig) -> Iterator[Finding]:
    """Through the engine's own code: write chunks, ask for them, read and compare, remove them."""
    with RoundTrip(tier) as trip:
        steps: dict[str, Callable[[], bool]] = {
            "write": lambda: trip.write(_CHUNKS, _WAIT_SECONDS),
            "look up": lambda: trip.found(_WAIT_SECONDS) == _CHUNKS,
            "read and compare": lambda: trip.read(_WAIT_SECONDS),
        }
        chunks = f"chunks of {size(trip.chunk_bytes)}"
        try:
            for name, step in steps.items():
                started = time.monotonic()
                good = step()
                seconds = time.monotonic() - started
                if not good:
                    hint = "look at the server's log, its maxmemory and the user's rights (ACL)"
                    detail = f"{chunks} did not go through: {trip.why}"
                    yield Finding(f"redis {name}", "error", detail, hint)
                    return
                yield Finding(f"redis {name}", "ok", f"{_CHUNKS} {chunks}", seconds=seconds)
        finally:
            admin.unlink_anywhere(trip.names)
