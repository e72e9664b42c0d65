"""Which KV heads and layers a rank holds, and which other ranks hold the same.

The unit that travels is one KV head (a *shard*), so instances of any tensor-parallel size read
each other's chunks. With 4 KV heads::

    tp_size     shards by tp_rank                      ranks that hold the same
    1           (0,1,2,3)                              (0)
    2           (0,1) (2,3)                            (0) (1)
    8           (0) (0) (1) (1) (2) (2) (3) (3)        (0,1) (2,3) (4,5) (6,7)
    MLA, any n  (0) on every rank                      (0,...,n-1)

This is how vLLM places them: ``QKVParallelLinear`` gives rank ``r`` the head ``r // replicas`` when
there are more ranks than heads, and a run of ``heads // tp_size`` heads otherwise; with MLA every
rank holds the one latent head. World ranks count tensor-parallel ranks fastest:
``rank = pp_rank * tp_size + tp_rank``. Context parallelism splits tokens, not heads, and is not
described here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_connector.kv_layout.paged_cache import Plane
from lmcache_connector.kv_parts.owners import Alike
from lmcache_connector.kv_parts.part import Part
from lmcache_connector.storage.geometry import ChunkGeometry


class TopologyError(ValueError):
    """A split vLLM could not run either. One sentence that names the numbers."""


@dataclass(frozen=True, slots=True)
class RankTopology:
    """Which heads and layers one rank holds, as in :class:`ChunkGeometry`."""

    shards: tuple[int, ...]
    layer_start: int
    num_layers: int


def all_ranks(
    *, tp_size: int, layer_counts: tuple[int, ...], num_kv_heads: int
) -> tuple[RankTopology, ...]:
    """Every rank of one instance, entry ``i`` being world rank ``i``.

    ``layer_counts[i]`` is the number of layers with KV on pipeline rank ``i``; its length is the
    pipeline-parallel size. ``num_kv_heads`` counts the whole model's, 1 with MLA.
    Raises :class:`TopologyError` for an uneven or impossible split.
    """
    if min(layer_counts) < 1:
        raise TopologyError(
            f"every pipeline rank needs a layer with KV, but the layer counts are {layer_counts}"
        )
    replicas = _replicas(num_kv_heads, tp_size)
    return tuple(
        RankTopology(
            _held_shards(num_kv_heads, tp_size, tp_rank, replicas),
            sum(layer_counts[:pp_rank]),
            num_layers,
        )
        for pp_rank, num_layers in enumerate(layer_counts)
        for tp_rank in range(tp_size)
    )


def ranks_alike(ranks: Sequence[RankTopology | ChunkGeometry]) -> Alike:
    """Those that hold the same heads of the same layers, together."""
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for rank, each in enumerate(ranks):
        groups.setdefault((each.shards, each.layer_start), []).append(rank)
    return tuple(map(tuple, groups.values()))


def _held_shards(num_shards: int, tp_size: int, tp_rank: int, replicas: int) -> tuple[int, ...]:
    if replicas > 1:
        return (tp_rank // replicas,)
    per_rank = num_shards // tp_size
    return tuple(range(tp_rank * per_rank, (tp_rank + 1) * per_rank))


def _replicas(num_shards: int, tp_size: int) -> int:
    """How many ranks hold the same shard."""
    if num_shards < 1:
        raise TopologyError(f"a model needs at least one KV head, not {num_shards}")
    if tp_size % num_shards == 0:
        return tp_size // num_shards
    if tp_size > num_shards:
        raise TopologyError(
            f"{num_shards} KV heads cannot be replicated evenly over {tp_size} tensor ranks"
        )
    if num_shards % tp_size:
        raise TopologyError(
            f"{num_shards} KV heads cannot be split evenly over {tp_size} tensor ranks"
        )
    return 1


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
    ``geometries`` list all ranks in order (TP within PP); a geometry's layers are those of the part
    in model order, whatever groups they are in. A state's chunk is one token long, and its heads
    are the ranks that hold pieces of it. ``num_kv_heads`` are those of one rank. ``planes`` say how
    a block lies in memory where strides do not, ``formats`` how the elements of each layer are
    stored. The bytes of ``mixed_tokens`` may lie among one another.
    """

    part: Part
    groups: tuple[GroupLayers, ...]
    geometries: tuple[ChunkGeometry, ...]
    num_kv_heads: int
    planes: tuple[Plane, ...]
    formats: tuple[str, ...]
    mixed_tokens: int = 1
