"""``check`` of a Redis: its limits, and a round trip of random chunks through the engine's code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from lmcache_connector.cli.check import Finding
from lmcache_connector.cli.report import size
from lmcache_connector.cli.target import open_admin
from lmcache_connector.cli.values import describe_server
from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.admin import RedisAdmin, RedisAdminError, ServerFacts
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.counters import WriteEnd
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.storage.redis.value_names import chunk_tag, stripe_suffix

_CHUNKS = 4
_TOKENS = 256
_LAYERS = 16
_WAIT_SECONDS = 10.0
_TTL_SECONDS = 60.0


def findings(tier: RedisTierConfig | None) -> list[Finding]:
    """Raises ``CliError`` if the server is unreachable."""
    if tier is None:
        return [Finding("redis", "ok", "none is configured")]
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
        hint = "`lmcache-connector ls --redis-url` with an operator's user shows its limits"
        return Finding("redis server", "warning", text, hint)
    hint = ""
    if not facts.max_bytes and tier.ttl_seconds is None:
        hint = "set maxmemory, and maxmemory-policy allkeys-lru, or redis_ttl_seconds"
    elif facts.max_bytes and facts.policy == "noeviction":
        hint = "set maxmemory-policy allkeys-lru: a full server refuses writes"
    return Finding("redis server", "warning" if hint else "ok", text, hint)


def _round_trip(admin: RedisAdmin, config: RedisTierConfig) -> Iterator[Finding]:
    """Write, look up, read, compare and remove chunks. Random keys touch no other chunks. They
    expire if the user lacks the right to remove them."""
    geometry = ChunkGeometry(_TOKENS, 0, (256,) * _LAYERS, (0,), 1, "uint8")
    keys = [os.urandom(CHUNK_KEY_BYTES) for _ in range(_CHUNKS)]
    data = [os.urandom(geometry.chunk_bytes) for _ in range(_CHUNKS)]
    geometries = PartGeometries((geometry,))
    tier = RedisTier(replace(config, ttl_seconds=_TTL_SECONDS), geometries)
    lookup = RedisLookup(config, [geometries])

    def until() -> float:
        return time.monotonic() + _WAIT_SECONDS

    def write() -> bool:
        stored: list[bool] = []
        for order, (key, chunk) in enumerate(zip(keys, data, strict=True)):
            tier.put(key, memoryview(chunk), stored.append, order)
        return tier.flush(_WAIT_SECONDS) and all(stored)

    def read() -> bool:
        buffers = [bytearray(geometry.chunk_bytes) for _ in keys]
        views = [memoryview(buffer) for buffer in buffers]
        return all(tier.read(keys, views, until()).hits) and buffers == data

    steps: dict[str, Callable[[], bool]] = {
        "write": write,
        "look up": lambda: lookup.exists_prefix(keys, until()) == _CHUNKS,
        "read and compare": read,
    }
    chunks = f"chunks of {size(geometry.chunk_bytes)}"
    try:
        for name, step in steps.items():
            started = time.monotonic()
            if not step():
                hint = "check the server's log, its maxmemory and the user's rights (ACL)"
                detail = f"{chunks} could not be written and read back: {_reason(tier)}"
                yield Finding(f"redis {name}", "error", detail, hint)
                return
            seconds = time.monotonic() - started
            yield Finding(f"redis {name}", "ok", f"{_CHUNKS} {chunks}", seconds=seconds)
    finally:
        lookup.close()
        tier.close(1.0)
        stripes = geometry.stripes(config.max_payload_bytes)
        with suppress(RedisAdminError):
            admin.unlink_anywhere(
                [chunk_tag(config.namespace, k) + stripe_suffix(s) for k in keys for s in stripes]
            )


def _reason(tier: RedisTier) -> str:
    stats = tier.stats()
    writes = stats.counts.writes
    not_written = writes[WriteEnd.FAILED] + writes[WriteEnd.QUEUE_FULL]
    reasons = {**stats.counts.misses, "not written": not_written}
    found = ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count)
    paused = "; the server refuses writes" if stats.writes_paused else ""
    return (found or "no answer in time") + paused
