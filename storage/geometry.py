"""Layout of a chunk's KV bytes: in the canonical chunk form, and in stored values.

A chunk buffer holds one rank's share of ``num_tokens`` tokens, shard by shard::

    shard 0 (one KV head)                    shard 1          ...
    | layer 0        | layer 1      | ...  | layer 0 | ...
    | t0 | t1 |..    | t0 | t1 |..           (t0: content of token 0)

A *shard* is one KV head over this rank's layers. A *stripe* is a run of consecutive layers of one
shard, stored as one value, so that a value exceeds ``max_value_bytes`` only if one layer does.
Shards are cut at multiples of one stripe width, counted from global layer 0, so ranks of different
pipeline splits share stripes wherever their borders allow it.

A model of layers with several rules or shapes has several *parts*; a chunk has a buffer per part
(:mod:`lmcache_connector.kv_parts.part`). "Layer" counts a part's layers in model order, in
whichever KV cache groups they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from lmcache_connector.kv_parts.part import part_of


@dataclass(frozen=True, slots=True)
class Stripe:
    """What one stored value holds of a chunk: layers ``[layer_start, layer_end)`` of one KV head.

    The payload ``[layers][tokens][content]`` takes ``num_bytes`` bytes at ``offset`` in the chunk
    buffer of the rank that holds it.
    """

    layer_start: int
    layer_end: int
    shard: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class ChunkGeometry:
    """One rank's share of one part of a chunk. Sizes in bytes. Raises ``ValueError`` if impossible.

    ``layer_widths[i]`` is the content width (K and V of one token and one KV head) of global layer
    ``layer_start + i``. ``shards`` are the global KV head indices in buffer order.
    """

    num_tokens: int
    layer_start: int
    layer_widths: tuple[int, ...]
    shards: tuple[int, ...]
    num_shards_total: int
    dtype: str

    def __post_init__(self) -> None:
        if self.num_tokens <= 0 or not self.layer_widths or min(self.layer_widths) <= 0:
            raise ValueError("a chunk needs tokens and layers of positive width")
        if self.layer_start < 0:
            raise ValueError("layer_start must not be negative")
        if not self.shards or len(set(self.shards)) != len(self.shards):
            raise ValueError("a chunk needs shards, each once")
        if not all(0 <= shard < self.num_shards_total for shard in self.shards):
            raise ValueError(f"shards {self.shards} are not all below {self.num_shards_total}")

    @property
    def layer_end(self) -> int:
        return self.layer_start + len(self.layer_widths)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Byte offset of each layer inside a shard, then the shard's size."""
        return tuple(accumulate((w * self.num_tokens for w in self.layer_widths), initial=0))

    @property
    def shard_bytes(self) -> int:
        return self.layer_offsets[-1]

    @property
    def chunk_bytes(self) -> int:
        return self.shard_bytes * len(self.shards)

    def stripe(self, layer_start: int, layer_end: int, shard: int) -> Stripe:
        """A run of layers of one shard. Raises ``ValueError`` if they are not in this geometry."""
        first, end = layer_start - self.layer_start, layer_end - self.layer_start
        if not 0 <= first < end <= len(self.layer_widths) or shard not in self.shards:
            raise ValueError(f"layers {layer_start} to {layer_end} of head {shard} are not here")
        offset = self.shards.index(shard) * self.shard_bytes + self.layer_offsets[first]
        num_bytes = self.layer_offsets[end] - self.layer_offsets[first]
        return Stripe(layer_start, layer_end, shard, offset, num_bytes)

    def stripes(self, max_payload_bytes: int) -> tuple[Stripe, ...]:
        """All stripes of this chunk, in buffer order. Each has at most as many layers as fit into
        ``max_payload_bytes`` if all are as wide as the widest, but at least one."""
        width = max(1, max_payload_bytes // (max(self.layer_widths) * self.num_tokens))
        cuts = [self.layer_start]
        cuts += range((self.layer_start // width + 1) * width, self.layer_end, width)
        cuts.append(self.layer_end)
        return tuple(
            self.stripe(start, end, shard) for shard in self.shards for start, end in pairwise(cuts)
        )


@dataclass(frozen=True)
class PartGeometries:
    """One rank's share of a chunk: one geometry per part of the model."""

    parts: tuple[ChunkGeometry, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a model has at least one part")

    def __len__(self) -> int:
        return len(self.parts)

    def index_of(self, key: bytes) -> int:
        """Number of the part that ``key`` names. Raises ``ValueError`` if there is none."""
        index = part_of(key, len(self.parts))
        if index >= len(self.parts):
            raise ValueError(f"key {key.hex()} names part {index} of {len(self.parts)}")
        return index

    def of(self, key: bytes) -> ChunkGeometry:
        """The geometry of ``key``'s part. Raises ``ValueError`` if there is none."""
        return self.parts[self.index_of(key)]

    @property
    def largest(self) -> ChunkGeometry:
        return max(self.parts, key=lambda part: part.chunk_bytes)
