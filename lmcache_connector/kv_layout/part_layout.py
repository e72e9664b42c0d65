"""One part of a model's KV as an engine's ranks hold it: which layers, where, and how large."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lmcache_connector.kv_layout.paged_cache import Plane
from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.kv_parts.part import Part, Rule
from lmcache_connector.storage.geometry import ChunkGeometry


@dataclass(frozen=True, slots=True)
class GroupLayers:
    """A part's layers in one of vLLM's KV cache groups: names, and places among the layers of the
    part that this rank has, both in model order.
    """

    names: tuple[str, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class PartLayout:
    """One part on the ranks of one engine.

    ``groups[i]`` are its layers in KV cache group ``part.groups[i]``, on the rank that asks.
    ``ranks`` and ``geometries`` list all ranks in order (TP within PP); a geometry's layers are
    those of the part in model order, whatever groups they are in. A state's chunk is one token
    long, and its heads are the ranks that hold pieces of it. ``num_kv_heads`` are those of one
    rank. ``planes`` say how a block lies in memory where strides do not, ``formats`` how the
    elements of each layer are stored. The bytes of ``mixed_tokens`` may lie among one another.
    """

    part: Part
    groups: tuple[GroupLayers, ...]
    ranks: tuple[RankTopology, ...]
    geometries: tuple[ChunkGeometry, ...]
    num_kv_heads: int
    planes: tuple[Plane, ...]
    formats: tuple[str, ...]
    mixed_tokens: int = 1

    @cached_property
    def blocks_per_chunk(self) -> int:
        """In each of its groups."""
        if self.part.rule is Rule.STATE:
            return 1
        return self.geometries[0].num_tokens // self.part.block_size
