"""Chunks in host memory, seen as blocks: the other side of a copy from or to a paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
)
from lmcache_connector.storage.geometry import ChunkGeometry


class ChunkBuffers:
    """Chunks in host memory, laid out as :class:`ChunkGeometry` says, and seen as blocks.

    Block ``i * blocks_per_chunk + j`` is block ``j`` of chunk ``i``. ``addresses[i]``: start of the
    ``geometry.chunk_bytes`` of chunk ``i``; ``owners`` keeps the memory alive. ``block_size`` is in
    tokens. ``layers``: for each layer of the paged cache, in its order, the position in the
    geometry; ``None``: all. A KV cache group has only some of a part's layers. ``planes``: those
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
        self.device = torch.device("cpu")
        self.block_size = self.row_tokens = block_size
        self.blocks_per_chunk = geometry.num_tokens // block_size
        self.num_blocks = len(addresses) * self.blocks_per_chunk
        self.addresses = np.asarray(addresses, np.int64)
        starts = np.sort(self.addresses)
        self.spans = np.stack((starts, starts + geometry.chunk_bytes), axis=1)
        self.layers = geometry, layers, planes
        self.geometry, self.owners = geometry, owners


BlockSpace = PagedLayout | ChunkBuffers
"""One side of a copy. Both have a ``device``, ``num_blocks`` of ``block_size`` tokens, the memory
used (``spans``), and ``layers``, of which :func:`layer_table` makes a table for rows of at most
(a paged cache: exactly) ``row_tokens`` tokens. ``addresses``: anchors of rows, see `rows_of`."""
Layers = LayerTable | tuple[ChunkGeometry, tuple[int, ...], tuple[Plane, ...]]


def layer_table(layers: Layers, row_tokens: int) -> LayerTable:
    """Layers in rows of ``row_tokens`` tokens. Raises :class:`LayoutError` if there are no such
    rows."""
    if not isinstance(layers, LayerTable):
        geometry, numbers, planes = layers
        for width in {geometry.layer_widths[number] for number in numbers}:
            check_planes("a chunk", planes, width)
        facts = (_facts(geometry, number, planes, row_tokens) for number in numbers)
        return LayerTable.of(row_tokens, chain.from_iterable(facts))
    if row_tokens != layers.row_tokens:
        raise LayoutError(f"rows of {row_tokens} tokens in a cache of {layers.row_tokens}")
    return layers


def rows_of(space: BlockSpace, block_ids: Int64s, row_tokens: int) -> Rows:
    """The rows of ``row_tokens`` tokens of these blocks, several per block where an attention
    backend splits blocks."""
    chunk, row = np.divmod(block_ids, space.num_blocks // max(1, len(space.addresses)))
    if (split := space.block_size // row_tokens) > 1:
        chunk = np.repeat(chunk, split)
        row = (row[:, None] * split + np.arange(split, dtype=np.int64)).ravel()
    return Rows(space.addresses[chunk], row)


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
