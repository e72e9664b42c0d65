"""Which KV heads and layers each rank holds, and which ranks hold the same.

The unit of transfer is one KV head (a *shard*), so instances of any tensor-parallel size read each
other's chunks. With 4 KV heads::

    tp_size     shards by tp_rank                      ranks that hold the same
    1           (0,1,2,3)                              (0)
    2           (0,1) (2,3)                            (0) (1)
    8           (0) (0) (1) (1) (2) (2) (3) (3)        (0,1) (2,3) (4,5) (6,7)
    MLA, any n  (0) on every rank                      (0,...,n-1)

vLLM's placement: with more ranks than heads, ``QKVParallelLinear`` gives rank ``r`` the head
``r // replicas``, else a run of ``heads // tp_size`` heads; with MLA every rank holds the one
latent head. World ranks count tensor-parallel ranks fastest: ``rank = pp_rank * tp_size +
tp_rank``. Context parallelism splits tokens, not heads, and is not covered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_connector.kv_layout.paged_cache import Plane
from lmcache_connector.kv_parts.owners import Alike
from lmcache_connector.kv_parts.part import Part
from lmcache_connector.storage.geometry import ChunkGeometry


@dataclass(frozen=True, slots=True)
class RankTopology:
    """Heads and layers of one rank, as in :class:`ChunkGeometry`."""

    shards: tuple[int, ...]
    layer_start: int
    num_layers: int


def all_ranks(
    *, tp_size: int, layer_counts: tuple[int, ...], num_kv_heads: int
) -> tuple[RankTopology, ...]:
    """All ranks of one instance; entry ``i`` is world rank ``i``.

    ``layer_counts[i]``: layers with KV on pipeline rank ``i``, one entry per stage.
    ``num_kv_heads``: of the whole model, 1 with MLA. It divides ``tp_size``, or ``tp_size`` divides
    it: vLLM refuses others.
    """
    return tuple(
        RankTopology(
            _held_shards(num_kv_heads, tp_size, tp_rank), sum(layer_counts[:pp_rank]), num_layers
        )
        for pp_rank, num_layers in enumerate(layer_counts)
        for tp_rank in range(tp_size)
    )


def ranks_alike(ranks: Sequence[RankTopology | ChunkGeometry]) -> Alike:
    """Groups of ranks that hold the same heads of the same layers."""
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for rank, each in enumerate(ranks):
        groups.setdefault((each.shards, each.layer_start), []).append(rank)
    return tuple(map(tuple, groups.values()))


def _held_shards(num_shards: int, tp_size: int, tp_rank: int) -> tuple[int, ...]:
    if tp_size > num_shards:
        return (tp_rank // (tp_size // num_shards),)
    per_rank = num_shards // tp_size
    return tuple(range(tp_rank * per_rank, (tp_rank + 1) * per_rank))


@dataclass(frozen=True, slots=True)
class GroupLayers:
    """A part's layers in one of vLLM's KV cache groups: names, and positions among this rank's
    layers of the part, both in model order.
    """

    names: tuple[str, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class PartLayout:
    """One part on the ranks of one engine.

    ``groups[i]``: its layers in KV cache group ``part.groups[i]``, on the calling rank.
    ``geometries``: of all ranks in order (TP within PP), with the part's layers in model order,
    whatever their groups. A recurrent state has chunks of one token, and one head per rank that
    holds a piece of it. ``num_kv_heads``: of one rank. ``planes``: a block's layout in memory, if
    strides cannot describe it. ``formats``: element format of each layer. Bytes may be interleaved
    within each group of ``mixed_tokens`` tokens.
    """

    part: Part
    groups: tuple[GroupLayers, ...]
    geometries: tuple[ChunkGeometry, ...]
    num_kv_heads: int
    planes: tuple[Plane, ...]
    formats: tuple[str, ...]
    mixed_tokens: int = 1
