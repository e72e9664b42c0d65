"""Parts of models as one rank holds them, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_connector.kv_layout.topology import GroupLayers, PartLayout
from lmcache_connector.kv_parts.part import Part, Rule
from lmcache_connector.storage.geometry import ChunkGeometry


def part_layout(
    geometry: ChunkGeometry,
    groups: Sequence[GroupLayers],
    block_size: int,
    *,
    rule: Rule = Rule.PREFIX,
    span: int = 0,
    first_group: int = 0,
) -> PartLayout:
    """On an engine of one rank."""
    numbers = tuple(range(first_group, first_group + len(groups)))
    num_heads = len(geometry.shards)
    return PartLayout(
        part=Part(rule, numbers, block_size, span),
        groups=tuple(groups),
        geometries=(geometry,),
        num_kv_heads=num_heads,
        planes=(),
        formats=(),
    )


def one_part(geometry: ChunkGeometry, block_size: int) -> tuple[PartLayout, ...]:
    """A model of one full-attention group, whose layers are called ``layers.0`` and so on."""
    places = tuple(range(len(geometry.layer_widths)))
    group = GroupLayers(tuple(f"layers.{place}" for place in places), places)
    return (part_layout(geometry, [group], block_size),)
