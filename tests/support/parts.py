"""Parts of models as one rank holds them, without a model, and settings of its CPU tier."""

from __future__ import annotations

from typing import Any

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.kv_layout.topology import GroupLayers, PartLayout
from lmcache_connector.kv_parts.part import Part, Rule
from lmcache_connector.storage.geometry import ChunkGeometry


def one_part(geometry: ChunkGeometry, block_size: int) -> tuple[PartLayout, ...]:
    """A model of one full-attention group, whose layers are called ``layers.0`` and so on."""
    places = tuple(range(len(geometry.layer_widths)))
    group = GroupLayers(tuple(f"layers.{place}" for place in places), places)
    part = Part(Rule.PREFIX, (0,), block_size, 0)
    heads = len(geometry.shards)
    return (PartLayout(part, (group,), (geometry,), heads, planes=(), formats=()),)


def tier_config(rank_gib: float, **settings: Any) -> ConnectorConfig:
    """Of one rank that shares with no other engine, with as much or little memory as it says.
    Tenants are guaranteed nothing."""
    alone = {"host_sharing": False, "tenant_share": 1.0, "pin_share": 0.0}
    return ConnectorConfig().model_copy(update={"cpu_gib": rank_gib, **alone, **settings})
