"""How a start shows in vLLM's log: our lines reach it, and one line says what is in effect."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.config import MIB

if TYPE_CHECKING:
    from lmcache_connector.config.tiered import ConnectorConfig
    from lmcache_connector.worker.self_test import SelfTestResult


def log_through(parent_name: str) -> None:
    """Send our log lines through the handlers of another logger (vLLM's), at its level.

    vLLM sets up its own loggers only; without this, everything below a warning would be lost.
    """
    ours, parent = logging.getLogger("lmcache_connector"), logging.getLogger(parent_name)
    if not ours.handlers and parent.handlers:
        ours.handlers = list(parent.handlers)
        ours.setLevel(parent.getEffectiveLevel())
        ours.propagate = False


def banner(
    config: ConnectorConfig,
    fingerprint: str,
    chunk_size: int,
    geometries: PartGeometries,
    self_test: SelfTestResult | None,
    redis_is_away: bool = False,
) -> str:
    """One line with the effective tiers, sizes, identity and the self-test's speeds; no secrets."""
    redis = config.redis_tier_config()
    away = " (not reachable yet)" if redis_is_away else ""
    sizes = " + ".join(f"{part.chunk_bytes / MIB:.2f}" for part in geometries.parts)
    share = f" ({config.rank_gib:g} per rank)" if config.rank_gib < config.cpu_gib else ""
    parts = [
        f"CPU tier {config.cpu_gib:g} GiB{share}",
        f"Redis {redis.address}{away}" if redis else "no Redis (redis_url is not set)",
        f"namespace {config.namespace}",
        f"model {fingerprint[:12]}",
        f"chunks of {chunk_size} tokens, {sizes} MiB per rank",
        f"compute_or_load {config.compute_or_load}",
    ]
    if self_test is not None:
        gigabytes = self_test.num_bytes / 1e9
        store = gigabytes / max(1e-9, self_test.store_seconds)  # the clock may be a coarse one
        load = gigabytes / max(1e-9, self_test.load_seconds)
        parts.append(f"self-test passed (store {store:.1f} GB/s, load {load:.1f} GB/s)")
    return "LMCacheTieredConnector: " + ", ".join(parts)
