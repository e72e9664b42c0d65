"""Chunks in host memory, seen as blocks: the other side of a copy from or to a paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
import torch

from lmcache_connector.kv_layout.paged_cache import (
    Int64s,
    LayerTable,
    LayoutError,
    PagedLayout,
    Plane,
    Rows,
    check_planes,
    split_rows,
)
from lmcache_connector.storage.geometry import ChunkGeometry


class ChunkBuffers:
    """Chunks in host memory in the canonical form, seen as blocks.

    Block ``i * blocks_per_chunk + j`` is block ``j`` of chunk ``i``. ``addresses[i]``: start of the
    ``geometry.chunk_bytes`` of chunk ``i``; ``owners`` keeps the memory alive. ``block_size`` is in
    tokens. ``layers``: positions in the geometry of the paged cache's layers, in its order;
    ``None``: all. A KV cache group has its own block ids, and some of a part's layers. ``planes``:
    of the paged cache. Raises :class:`LayoutError` for sizes that do not fit together.
    """

    def __init__(
        self,
        geometry: ChunkGeometry,
        block_size: int,
        addresses: Sequence[int],
        owners: object,
        layers: tuple[int, ...] | None = None,
        planes: tuple[Plane, ...] = (),
    ) -> None:
        num_layers = len(geometry.layer_widths)
        if layers is None:
            layers = tuple(range(num_layers))
        if block_size <= 0 or geometry.num_tokens % block_size:
            raise LayoutError(f"chunks of {geometry.num_tokens} tokens, blocks of {block_size}")
        if not layers or not 0 <= min(layers) <= max(layers) < num_layers:
            raise LayoutError(f"no layers {layers} in a chunk of {num_layers}")
        if len(set(layers)) != len(layers):
            raise LayoutError(f"layers {layers} are not listed once each")
        if min(addresses, default=1) <= 0:
            raise LayoutError("a chunk has no memory")
        self.geometry = geometry
        self.block_size = block_size
        self.device = torch.device("cpu")
        self.owners = owners
        self.addresses = np.asarray(addresses, np.int64)
        self._layers = layers
        for width in {geometry.layer_widths[layer] for layer in layers}:
            check_planes("a chunk", planes, width)
        self._planes = planes

    @property
    def blocks_per_chunk(self) -> int:
        return self.geometry.num_tokens // self.block_size

    @property
    def num_blocks(self) -> int:
        return len(self.addresses) * self.blocks_per_chunk

    @property
    def row_tokens(self) -> int:
        return self.block_size

    @property
    def spans(self) -> Int64s:
        starts = np.sort(self.addresses)
        return np.stack((starts, starts + self.geometry.chunk_bytes), axis=1)

    def layers(self, row_tokens: int) -> LayerTable:
        return _chunk_table(self.geometry, self._layers, self._planes, row_tokens)

    def rows(self, block_ids: Int64s, row_tokens: int) -> Rows:
        split = self.block_size // row_tokens
        chunk, block = np.divmod(block_ids, self.blocks_per_chunk)
        return Rows(np.repeat(self.addresses[chunk], split), split_rows(block, split))


BlockSpace = PagedLayout | ChunkBuffers
"""One side of a copy."""


@lru_cache(maxsize=256)
def _chunk_table(
    geometry: ChunkGeometry, layers: tuple[int, ...], planes: tuple[Plane, ...], row_tokens: int
) -> LayerTable:
    """The layers of a chunk, in rows of ``row_tokens`` tokens. Cached for all jobs of an engine."""
    facts = (_facts(geometry, layer, planes, row_tokens) for layer in layers)
    return LayerTable.of(row_tokens, chain.from_iterable(facts))


def _facts(
    geometry: ChunkGeometry, layer: int, planes: tuple[Plane, ...], row_tokens: int
) -> Iterator[tuple[int, ...]]:
    """One layer's entries for `LayerTable.of`."""
    heads, head_bytes = len(geometry.shards), geometry.shard_bytes
    width, offset = geometry.layer_widths[layer], geometry.layer_offsets[layer]
    if not planes:
        yield heads, row_tokens, width, offset, width * row_tokens, head_bytes, width
    for plane in planes:
        run = plane.run_token_bytes * row_tokens
        stride = plane.run_token_bytes * geometry.num_tokens
        yield heads, plane.num_runs, run, offset, run, head_bytes, stride
        offset += plane.num_runs * stride
