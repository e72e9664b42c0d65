"""A checked copy between two block spaces, as tables of integers.

All errors of a copy are found here, before the first byte is copied. The result is a table with one
move per layer, and the rows to apply the moves to. It has no entry per run, so planning a copy of
a million runs executes no more Python code than planning one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch

from lmcache_connector.kv_layout.chunk_buffers import BlockSpace, Layers, layer_table, rows_of
from lmcache_connector.kv_layout.paged_cache import Int64s, LayerTable, Rows


class Move(IntEnum):
    """Columns of ``CopyPlan.moves``; strides in bytes.

    ``ROWS_JOIN`` is 1 if consecutive rows are one run in both spaces.
    """

    SRC_OFFSET = 0
    DST_OFFSET = 1
    SRC_ROW_STRIDE = 2
    DST_ROW_STRIDE = 3
    OUTER_COUNT = 4
    OUTER_SRC_STRIDE = 5
    OUTER_DST_STRIDE = 6
    INNER_COUNT = 7
    INNER_SRC_STRIDE = 8
    INNER_DST_STRIDE = 9
    RUN_BYTES = 10
    ROWS_JOIN = 11


class CopyError(ValueError):
    """An invalid copy; no byte was copied."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Copies block ``src_block_ids[i]`` of ``src`` to ``dst_block_ids[i]`` of ``dst``, all layers.

    Each KV cache group has block ids of its own, and needs a copy of its own.
    """

    src: BlockSpace
    dst: BlockSpace
    src_block_ids: Sequence[int]
    dst_block_ids: Sequence[int]

    def plan(self, src_device: torch.device, dst_device: torch.device) -> CopyPlan:
        """Check the copy and prepare it for a copier between these devices: addresses are valid on
        their device only. Raises :class:`CopyError`, or :class:`LayoutError` from the layouts."""
        src, dst = self.src, self.dst
        if (src.device, dst.device) != (src_device, dst_device):
            raise CopyError(
                f"a copy from {src.device} to {dst.device} was given to a copier "
                f"from {src_device} to {dst_device}"
            )
        src_ids = _block_ids("source", self.src_block_ids, src.num_blocks)
        dst_ids = _block_ids("destination", self.dst_block_ids, dst.num_blocks)
        if len(src_ids) != len(dst_ids):
            raise CopyError(f"{len(src_ids)} source blocks for {len(dst_ids)} destination blocks")
        if len(np.unique(dst_ids)) != len(dst_ids):
            raise CopyError("a destination block is listed more than once")
        if src.block_size != dst.block_size:
            raise CopyError(f"blocks of {src.block_size} tokens into blocks of {dst.block_size}")
        _check_memory(src.spans, dst.spans)
        row_tokens = min(src.row_tokens, dst.row_tokens)
        moves, row_bytes = _moves_and_row_bytes(src.layers, dst.layers, row_tokens)
        rows = rows_of(src, src_ids, row_tokens), rows_of(dst, dst_ids, row_tokens)
        return CopyPlan(moves, *rows, _groups(*rows), len(rows[0].index) * row_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """``moves``: int64 ``[layers, len(Move)]``, or one row per layer and plane. ``groups``: int64
    ``[n + 1]``, borders between groups of rows; rows of a group are consecutive in both spaces."""

    moves: Int64s
    src: Rows
    dst: Rows
    groups: Int64s
    num_bytes: int


@lru_cache(maxsize=256)
def _moves_and_row_bytes(
    src_layers: Layers, dst_layers: Layers, row_tokens: int
) -> tuple[Int64s, int]:
    """The part of :class:`CopyPlan` common to all copies between these layers. Cached, because an
    engine has few kinds of copies."""
    src, dst = layer_table(src_layers, row_tokens), layer_table(dst_layers, row_tokens)
    _check_layers(src, dst)
    return _moves(src, dst), int((src.num_heads * src.num_runs * src.content_bytes).sum())


def _block_ids(side: str, block_ids: Sequence[int], num_blocks: int) -> Int64s:
    ids = np.asarray(block_ids)
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise CopyError(f"{side} block ids must be a list of integers")
    if ids.min() < 0 or ids.max() >= num_blocks:
        raise CopyError(
            f"{side} block ids reach from {ids.min()} to {ids.max()}, there are {num_blocks} blocks"
        )
    return ids.astype(np.int64)


def _check_memory(src_spans: Int64s, dst_spans: Int64s) -> None:
    """Check that no destination chunks overlap, and that source and destination do not."""
    if (dst_spans[1:, 0] < dst_spans[:-1, 1]).any():
        raise CopyError("destination chunks overlap in memory")
    first = np.searchsorted(dst_spans[:, 1], src_spans[:, 0], side="right")
    last = np.searchsorted(dst_spans[:, 0], src_spans[:, 1], side="left")
    if (first < last).any():
        raise CopyError("source and destination overlap in memory")


def _check_layers(src: LayerTable, dst: LayerTable) -> None:
    if len(src.offset) != len(dst.offset):
        raise CopyError(f"{len(src.offset)} source layers for {len(dst.offset)}")
    differ = (src.num_heads != dst.num_heads) | (src.content_bytes != dst.content_bytes)
    differ |= src.num_runs != dst.num_runs
    if differ.any():
        at = int(np.flatnonzero(differ)[0])
        raise CopyError(f"layer {at}: {_shape(src, at)} into {_shape(dst, at)}")


def _shape(table: LayerTable, at: int) -> str:
    runs = f"{table.num_runs[at]} runs of " if table.num_runs[at] != table.row_tokens else ""
    return f"{table.num_heads[at]} heads of {runs}{table.content_bytes[at]} bytes"


def _moves(src: LayerTable, dst: LayerTable) -> Int64s:
    """One move per layer: up to two loops around a run as long as both sides allow."""
    run = src.content_bytes
    tokens = src.num_runs
    heads = src.num_heads
    run, tokens = _fold(run, tokens, src.token_stride, dst.token_stride)
    run, heads = _fold(run, heads, src.head_stride, dst.head_stride)
    run, tokens = _fold(run, tokens, src.token_stride, dst.token_stride)
    rows_join = (heads * tokens == 1) & (src.row_stride == run) & (dst.row_stride == run)
    # Read in memory order: prefetching matters more than the order of streaming stores.
    heads_inner = src.head_stride < src.token_stride
    by_token = (tokens, src.token_stride, dst.token_stride)
    by_head = (heads, src.head_stride, dst.head_stride)
    outer = [np.where(heads_inner, a, b) for a, b in zip(by_token, by_head, strict=True)]
    inner = [np.where(heads_inner, b, a) for a, b in zip(by_token, by_head, strict=True)]
    columns = [src.offset, dst.offset, src.row_stride, dst.row_stride, *outer, *inner]
    return np.stack([*columns, run, rows_join.astype(np.int64)], axis=1)


def _fold(run: Int64s, count: Int64s, src: Int64s, dst: Int64s) -> tuple[Int64s, Int64s]:
    """Merge an axis into the run where the axis continues the run on both sides."""
    joins = (src == run) & (dst == run)
    return np.where(joins, run * count, run), np.where(joins, 1, count)


def _groups(src: Rows, dst: Rows) -> Int64s:
    if len(src.index) == 0:
        return np.zeros(1, np.int64)
    breaks = np.zeros(len(src.index) - 1, bool)
    for side in (src, dst):
        breaks |= (np.diff(side.index) != 1) | (np.diff(side.anchor) != 0)
    return np.concatenate(([0], np.flatnonzero(breaks) + 1, [len(src.index)])).astype(np.int64)
