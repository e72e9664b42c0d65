"""How a copy between chunks and a cache on a device is cut into long transfers.

A run of a paged cache may be as short as one token of one head, while a bus is fast only with
megabytes. So a chunk crosses the bus in one piece, to or from a *staging slot*: device memory that
holds chunks in their canonical form. Between the slot and the paged cache a kernel moves the rows,
by the same plan as the whole copy, with the chunks' addresses replaced by places in the slot::

    paged cache  --gather-->  slot 0  --one transfer per chunk-->  chunk 0
                 --gather-->  slot 1  --------------------------->  chunk 1   (overlaps with slot 0)

This module only computes; :mod:`lmcache_connector.copy_kv_blocks.cuda` copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmcache_connector.copy_kv_blocks.plan import CopyPlan, Move
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import Int64s


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """One chunk between host memory and a staging slot: two addresses, and a size in bytes."""

    host: int
    staged: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Chunks that pass through slot number ``slot`` together: of each plan the rows from
    ``rows[i][0]`` up to ``rows[i][1]``."""

    slot: int
    rows: tuple[tuple[int, int], ...]
    copies: tuple[SlotCopy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StagedCopy:
    """``rows``: of each plan int64 ``[4, rows]``: anchor and index at the source, then at the
    destination."""

    rows: tuple[Int64s, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Every run of a plan on its own, int64 ``[runs]`` each."""

    src: Int64s
    dst: Int64s
    num_bytes: Int64s


def covers_chunks(plans: Sequence[CopyPlan], host: ChunkBuffers) -> bool:
    """Whether the copies together write all bytes of every chunk they touch, each once.

    If not, whole chunks must not travel to the host: they would overwrite bytes outside the copy.
    """
    chunks = np.unique(np.concatenate([plan.dst.anchor for plan in plans]))
    return sum(plan.num_bytes for plan in plans) == len(chunks) * host.geometry.chunk_bytes


def stage(
    plans: Sequence[CopyPlan],
    host: ChunkBuffers,
    to_host: bool,
    slots: Sequence[int],
    slot_bytes: int,
) -> StagedCopy:
    """Cut copies from or to the same chunks into tiles that use ``slots`` (device addresses) in
    turn.

    A slot holds at least one chunk. Rows are put in the order of their chunks.
    """
    chunk_bytes = host.geometry.chunk_bytes
    anchors = [plan.dst.anchor if to_host else plan.src.anchor for plan in plans]
    addresses = np.unique(np.concatenate(anchors))
    per_slot = slot_bytes // chunk_bytes
    place = np.arange(len(addresses))
    staged = np.asarray(slots, np.int64)[place // per_slot % len(slots)]
    staged = staged + place % per_slot * chunk_bytes
    rows, borders = [], []
    for plan, anchor in zip(plans, anchors, strict=True):
        order = np.argsort(anchor, kind="stable")
        rows.append(_staged_rows(plan, to_host, order, staged[np.searchsorted(addresses, anchor)]))
        starts = np.searchsorted(anchor[order], addresses)
        borders.append([*starts.tolist(), len(order)])
    tiles = []
    for first in range(0, len(addresses), per_slot):
        last = min(first + per_slot, len(addresses))
        copies = tuple(
            SlotCopy(int(addresses[i]), int(staged[i]), chunk_bytes) for i in range(first, last)
        )
        slot = first // per_slot % len(slots)
        tiles.append(Tile(slot, tuple((each[first], each[last]) for each in borders), copies))
    return StagedCopy(tuple(rows), tuple(tiles))


def _staged_rows(plan: CopyPlan, to_host: bool, order: Int64s, staged: Int64s) -> Int64s:
    """A plan's rows in ``order``, with the slots' addresses ``staged`` instead of the chunks'."""
    paged, chunks = (plan.src, plan.dst) if to_host else (plan.dst, plan.src)
    paged_side = [paged.anchor[order], paged.index[order]]
    slot_side = [staged[order], chunks.index[order]]
    return np.stack(paged_side + slot_side if to_host else slot_side + paged_side)


def expand(plan: CopyPlan) -> Runs:
    """List every run of a plan, for copies whose runs are long or few."""
    parts = [_layer_runs(plan, move) for move in plan.moves]
    src, dst, sizes = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Runs(src, dst, sizes)


def _layer_runs(plan: CopyPlan, move: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    rows = plan.groups[:-1] if move[Move.ROWS_JOIN] else np.arange(len(plan.src.index))
    lengths = np.diff(plan.groups) if move[Move.ROWS_JOIN] else np.ones_like(rows)
    outer = np.arange(move[Move.OUTER_COUNT])[:, None]
    inner = np.arange(move[Move.INNER_COUNT])[None, :]
    src_rows = (
        plan.src.anchor[rows]
        + move[Move.SRC_OFFSET]
        + plan.src.index[rows] * move[Move.SRC_ROW_STRIDE]
    )
    dst_rows = (
        plan.dst.anchor[rows]
        + move[Move.DST_OFFSET]
        + plan.dst.index[rows] * move[Move.DST_ROW_STRIDE]
    )
    src = (
        src_rows[:, None]
        + (outer * move[Move.OUTER_SRC_STRIDE] + inner * move[Move.INNER_SRC_STRIDE]).ravel()
    ).ravel()
    dst = (
        dst_rows[:, None]
        + (outer * move[Move.OUTER_DST_STRIDE] + inner * move[Move.INNER_DST_STRIDE]).ravel()
    ).ravel()
    return src, dst, np.repeat(lengths * move[Move.RUN_BYTES], outer.size * inner.size)
