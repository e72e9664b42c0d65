"""How a rank's paged cache lies in memory, for a peer that reads blocks out of it.

Blocks of two caches fit together if each head's part of a row is one run of bytes in both: then
any heads can be read. Otherwise whole rows are read, if they hold the same heads in the same order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np

from lmcache_connector.kv_layout.paged_cache import LayerTable, PagedLayout, split_rows
from lmcache_connector.p2p.control.messages import CacheForm, LayerForm
from lmcache_connector.p2p.data.nixl_agent import Runs


def form_of(paged: PagedLayout) -> CacheForm:
    """Of a cache that has no planes."""
    table = paged.table
    layers = tuple(_layer_form(table, layer) for layer in range(len(table.offset)))
    return CacheForm(paged.row_tokens, paged.block_size, paged.num_blocks, layers)


def _layer_form(table: LayerTable, layer: int) -> LayerForm:
    return LayerForm(
        address=int(table.offset[layer]),
        num_heads=int(table.num_heads[layer]),
        token_bytes=int(table.content_bytes[layer]),
        row_stride=int(table.row_stride[layer]),
        head_stride=int(table.head_stride[layer]),
        token_stride=int(table.token_stride[layer]),
    )


def fits(
    own: CacheForm,
    mine: LayerForm,
    other: CacheForm,
    theirs: LayerForm,
    num_heads: int,
) -> bool:
    """Whether ``num_heads`` heads of a layer can be read from block to block."""
    sizes = (own.row_tokens, own.block_size, mine.token_bytes)
    if sizes != (other.row_tokens, other.block_size, theirs.token_bytes):
        return False
    if _is_by_head(mine) and _is_by_head(theirs):
        return True
    return (
        (mine.head_stride, mine.token_stride) == (theirs.head_stride, theirs.token_stride)
        and num_heads == mine.num_heads == theirs.num_heads
        and _is_dense(own, mine)
        and _is_dense(other, theirs)
    )


def runs(form: CacheForm, layer: LayerForm, block_ids: Sequence[int], heads: Sequence[int]) -> Runs:
    """Where these blocks of a layer lie, row by row. ``heads``: counted over the rank's own."""
    rows = split_rows(np.asarray(block_ids, np.int64), form.block_size // form.row_tokens)
    starts = layer.address + rows * layer.row_stride
    size = form.row_tokens * layer.token_bytes
    if _is_by_head(layer):
        starts = (starts[:, None] + np.asarray(heads, np.int64) * layer.head_stride).ravel()
    else:
        size *= layer.num_heads
    return np.column_stack((starts, np.full_like(starts, size))).astype(np.uint64)


def joined(*sides: Runs) -> tuple[Runs, ...]:
    """Neighbours as one run, where they are neighbours on all sides."""
    gap = np.zeros(max(0, len(sides[0]) - 1), np.bool_)
    for side in sides:
        gap |= side[1:, 0] != side[:-1, 0] + side[:-1, 1]
    first = np.concatenate(([0], np.flatnonzero(gap) + 1)).astype(np.int64)
    if not len(sides[0]):
        return sides
    return tuple(
        np.column_stack((side[first, 0], np.add.reduceat(side[:, 1], first))) for side in sides
    )


def in_order(local: Runs, remote: Runs) -> tuple[Runs, ...]:
    """A read in the order of the memory it comes from, in as few runs as there can be."""
    order = np.argsort(remote[:, 0])
    return joined(local[order], remote[order])


def bytes_at(places: Runs) -> Iterator[memoryview]:
    """Host memory, run by run. The caller keeps it alive."""
    for address, size in joined(places)[0].tolist():
        yield memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _is_by_head(layer: LayerForm) -> bool:
    return layer.token_stride == layer.token_bytes


def _is_dense(form: CacheForm, layer: LayerForm) -> bool:
    """Whether a row of all heads is one run of bytes, token by token."""
    return (
        layer.head_stride == layer.token_bytes
        and layer.token_stride == layer.num_heads * layer.token_bytes
        and layer.row_stride >= form.row_tokens * layer.token_stride
    )
