"""Builds the parts of the connector from its configuration and the model."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.load_policy import LoadPolicy
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.keys.request_identity import RequestIdentifier
from lmcache_connector.plans import Tier
from lmcache_connector.scheduler.adapter import SchedulerAdapter
from lmcache_connector.scheduler.background_lookup import BackgroundLookup
from lmcache_connector.scheduler.kv_events import KvEventLog
from lmcache_connector.scheduler.request_state import SchedulerSettings

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.model import ModelDescription


def build_scheduler(
    config: ConnectorConfig,
    model: ModelDescription,
    *,
    loads: bool,
    stores: bool,
    kv_events: bool,
) -> SchedulerAdapter:
    """``loads`` and ``stores``: what ``kv_role`` allows."""
    return SchedulerAdapter(
        SchedulerSettings(
            chunk_size=config.chunk_size,
            block_sizes=(model.block_size,),
            world_size=model.world_size,
            loads=loads,
            stores=stores,
            store_generated=config.store_generated,
            redis_only_reused=config.redis_admission == "reused",
            load_deadline_seconds=config.load_deadline_seconds,
            lookup_wait_seconds=config.lookup_wait_seconds,
        ),
        PrefixHasher(model.root, config.chunk_size, config.hash_key_bytes),
        RequestIdentifier(config.require_cache_salt).identify,
        _make_lookup(config, model),
        _make_choice(config, model),
        kv_events=KvEventLog(model.world_size) if kv_events else None,
    )


def _make_lookup(config: ConnectorConfig, model: ModelDescription) -> BackgroundLookup | None:
    tier_config = config.redis_tier_config()
    if tier_config is None:
        return None
    from lmcache_connector.storage.redis.lookup import RedisLookup

    lookup = RedisLookup(tier_config, model.geometries)
    return BackgroundLookup(
        lookup,
        config.lookup_deadline_seconds,
        time.monotonic,
        servers=lookup.servers,
    )


def _make_choice(config: ConnectorConfig, model: ModelDescription) -> LoadPolicy:
    """Requests may try the CPU tier, which cannot stall; Redis is measured by a probe."""
    cost_model = CostModel(
        clock=time.monotonic,
        rng=random.Random(),
        max_deadline_seconds=config.load_deadline_seconds,
        mode=config.compute_or_load,
        explores=frozenset({Tier.CPU}),
    )
    return LoadPolicy(
        cost_model,
        chunk_tokens=config.chunk_size,
        chunk_bytes=max(geometry.chunk_bytes for geometry in model.geometries),
        clock=time.monotonic,
        num_stages=len({rank.layer_start for rank in model.ranks}),
    )
