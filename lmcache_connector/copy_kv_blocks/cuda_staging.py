"""Cuts a copy between chunks and a device's cache into long transfers.

A run of a paged cache may be as short as one token of one head, but a bus needs megabytes to be
fast. So each chunk crosses the bus in one transfer, to or from a *staging slot*: device memory that
holds chunks in canonical form. A kernel copies the rows between slot and paged cache by the plan of
the whole copy, with addresses in the slot in place of the chunks' addresses::

    paged cache  --gather-->  slot 0  --one transfer per chunk-->  chunk 0
                 --gather-->  slot 1  --------------------------->  chunk 1   (overlaps with slot 0)

The first half of this module only computes; :mod:`lmcache_connector.copy_kv_blocks.cuda` copies.
The second half has the CUDA driver calls that PyTorch lacks; every call releases the GIL. Names and
types: CUDA driver API, sections "Memory Management" and "Driver Entry Point Access".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np

from lmcache_connector.copy_kv_blocks.plan import CopyPlan, Move
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import Int64s


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """One chunk's transfer between host memory and a staging slot: addresses, size in bytes."""

    host: int
    staged: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Chunks that are in slot number ``slot`` together, with rows ``rows[i][0]`` up to
    ``rows[i][1]`` of plan i."""

    slot: int
    rows: tuple[tuple[int, int], ...]
    copies: tuple[SlotCopy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StagedCopy:
    """``rows``: per plan int64 ``[4, rows]``: anchor and index at the source, then at the
    destination."""

    rows: tuple[Int64s, ...]
    tiles: tuple[Tile, ...]


def covers_chunks(plans: Sequence[CopyPlan], host: ChunkBuffers) -> bool:
    """Whether the copies together write every byte of each chunk that they touch, once. If not,
    transfers of whole chunks to the host would overwrite bytes outside the copy."""
    chunks = np.unique(np.concatenate([plan.dst.anchor for plan in plans]))
    return sum(plan.num_bytes for plan in plans) == len(chunks) * host.geometry.chunk_bytes


def stage(
    plans: Sequence[CopyPlan],
    host: ChunkBuffers,
    to_host: bool,
    slots: Sequence[int],
    slot_bytes: int,
) -> StagedCopy:
    """Cut copies of the same chunks into tiles that use ``slots`` (device addresses) in turn.

    A slot must hold at least one chunk. Rows are sorted by chunk.
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
    """A plan's rows in ``order``, with slot addresses ``staged`` in place of chunk addresses."""
    paged, chunks = (plan.src, plan.dst) if to_host else (plan.dst, plan.src)
    paged_side = [paged.anchor[order], paged.index[order]]
    slot_side = [staged[order], chunks.index[order]]
    return np.stack(paged_side + slot_side if to_host else slot_side + paged_side)


def expand(plan: CopyPlan) -> tuple[Int64s, Int64s, Int64s]:
    """Every run of a plan, for copies that are not staged: source addresses, destination addresses,
    and sizes in bytes, int64 ``[runs]`` each."""
    parts = [_layer_runs(plan, move) for move in plan.moves]
    src, dst, sizes = (np.concatenate(part) for part in zip(*parts, strict=True))
    return src, dst, sizes


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


_BATCH_SINCE_CUDA = 12080
"""``cuMemcpyBatchAsync`` with CUDA 12.8's arguments; later drivers keep this entry point."""
_SRC_ACCESS_ORDER_STREAM = 1
_MAX_BATCH = 4096
"""Copies per call. Drivers have crashed and hung with 50,000 (vLLM's issue 49276)."""


class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_uint), ("id", c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("src_access_order", c_uint),
        ("src_location_hint", _Location),
        ("dst_location_hint", _Location),
        ("flags", c_uint),
    )


class CudaDriver:
    """Copies between one device and host memory, ordered by a stream."""

    def __init__(self, device_index: int) -> None:
        """Retain the device's primary context, which PyTorch uses too."""
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.cuMemcpyAsync.argtypes = (c_uint64, c_uint64, c_size_t, c_void_p)
        self._library.cuCtxSetCurrent.argtypes = (c_void_p,)
        self._device = c_int()
        self._context = c_void_p()
        self._check(self._library.cuInit(0))
        self._check(self._library.cuDeviceGet(byref(self._device), c_int(device_index)))
        self._check(self._library.cuDevicePrimaryCtxRetain(byref(self._context), self._device))
        self._batch = self._find_batch()

    def close(self) -> None:
        self._check(self._library.cuDevicePrimaryCtxRelease_v2(self._device))

    def bind(self) -> None:
        """Make the device's context current on the calling thread; new threads have none."""
        self._check(self._library.cuCtxSetCurrent(self._context))

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        """Start one copy; the addresses imply its direction."""
        self._check(self._library.cuMemcpyAsync(dst, src, num_bytes, stream))

    def copy_many(self, dst: Int64s, src: Int64s, num_bytes: Int64s, stream: int) -> None:
        """Start many copies: ``_MAX_BATCH`` per call at most, if the driver can (CUDA 12.8). One by
        one otherwise, and on the default stream (0), which that call refuses."""
        if len(dst) == 0:
            return
        if self._batch is None or stream == 0:
            for to, start, size in zip(dst.tolist(), src.tolist(), num_bytes.tolist(), strict=True):
                self.copy(to, start, size, stream)
            return
        attributes = _CopyAttributes(src_access_order=_SRC_ACCESS_ORDER_STREAM)
        first, failed = c_size_t(0), c_size_t(0)
        table = np.stack((dst, src, num_bytes))
        for start in range(0, len(dst), _MAX_BATCH):
            part = [np.ascontiguousarray(row) for row in table[:, start : start + _MAX_BATCH]]
            columns = [row.ctypes.data for row in part]
            options = byref(attributes), byref(first), 1, byref(failed)
            self._check(self._batch(*columns, len(part[0]), *options, stream))

    def _find_batch(self) -> ctypes._CFuncPtr | None:  # type: ignore[name-defined]
        address, status = c_void_p(), c_int()
        result = self._library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync",
            byref(address),
            c_int(_BATCH_SINCE_CUDA),
            c_uint64(0),
            byref(status),
        )
        if result != 0 or not address.value:
            return None
        pointers = (c_void_p,) * 3
        kind = ctypes.CFUNCTYPE(
            c_int,
            *pointers,
            c_size_t,
            POINTER(_CopyAttributes),
            POINTER(c_size_t),
            c_size_t,
            POINTER(c_size_t),
            c_void_p,
        )
        return kind(address.value)

    def _check(self, result: int) -> None:
        if result == 0:
            return
        message = ctypes.c_char_p()
        self._library.cuGetErrorString(c_int(result), byref(message))
        text = message.value.decode() if message.value else "unknown error"
        raise CudaError(f"CUDA driver error {result}: {text}")
