"""Copies between host memory and a KV cache on a CUDA device.

Each direction has a *pipeline* of two side streams with a staging slot each, so that one slot's
gather or scatter overlaps the other's transfer, and both overlap the forward pass on the compute
stream. Each slot's stream orders its operations. The side streams wait for the caller's fence, the
calling thread waits for the end. Copies of long runs bypass the slots.

Memory on the device: two slots for each of the two pipelines, and one for copies inside steps,
allocated at the first copy of each kind (the self-test at start). Host memory may be unpinned, but
copies are slower then.

Threads: one copy per direction at a time; further ones wait.

A copy that the next forward pass reads is enqueued on the compute stream itself, with a slot of its
own, and no thread waits for it.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from lmcache_connector.copy_kv_blocks.copier import QueuedCopy
from lmcache_connector.copy_kv_blocks.cuda_gather import RowCopyKernel
from lmcache_connector.copy_kv_blocks.cuda_staging import (
    CudaDriver,
    StagedCopy,
    Tile,
    covers_chunks,
    expand,
    stage,
)
from lmcache_connector.copy_kv_blocks.plan import BlockCopy, CopyPlan, Move
from lmcache_connector.kv_layout.chunk_buffers import BlockSpace, ChunkBuffers

DIRECT_MIN_RUN_BYTES = 256 << 10
"""Copies whose runs are all at least this long are not staged. On an H200, staged copies reach 49
of the bus's 55 GB/s, and separate transfers of 64 KiB reach 37 GB/s. A transfer costs 0.6 us on top
of its bytes: at 256 KiB both ways are equally fast.
"""
SLOT_BYTES = 32 << 20
"""Size of a staging slot: large enough to saturate the bus. A larger chunk gets a larger slot."""
SLOTS_PER_PIPELINE = 2
TABLE_WORDS = 1 << 16
"""64-bit words of a pipeline's first tables: enough for about 16,000 blocks per copy."""

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class CudaFence:
    """An event in a stream of ``device``, for any thread.

    A new thread's current device is the first GPU. Querying an event of another GPU from there
    would create a context on the first: half a GiB of a GPU that may belong to another process.
    """

    event: torch.cuda.Event
    device: torch.device

    def query(self) -> bool:
        with torch.cuda.device(self.device):
            return bool(self.event.query())

    def elapsed_time(self, end: Any, /) -> float:
        return float(self.event.elapsed_time(end.event))


@dataclass(slots=True, eq=False)
class _Slot:
    stream: torch.cuda.Stream
    memory: torch.Tensor


class _Pipeline:
    """Streams, staging slots and tables of one direction. Used by one thread at a time."""

    def __init__(
        self,
        device: torch.device,
        driver: CudaDriver,
        slot_bytes: int,
        num_slots: int = SLOTS_PER_PIPELINE,
    ) -> None:
        self._slot_bytes = slot_bytes
        self._driver = driver
        self._device = device
        self._slots = [
            _Slot(torch.cuda.Stream(device), torch.empty(0, dtype=torch.uint8, device=device))
            for _ in range(num_slots)
        ]
        self._tables = torch.empty(0, dtype=torch.int64, device=device)
        self._host_tables = torch.empty(0, dtype=torch.int64)
        self._ready = torch.cuda.Event()
        self._done = [torch.cuda.Event(blocking=True) for _ in self._slots]
        self._waits = True

    def on_stream(self, stream: torch.cuda.Stream) -> _Pipeline:
        """A pipeline on ``stream``, with this one's first slot and tables of its own, whose calls
        do not wait. The caller keeps it until the device has finished."""
        (slot, *_), inline = self._slots, copy.copy(self)
        if slot.stream != stream:
            stream.wait_stream(slot.stream)
            slot.stream = stream
        inline._slots, inline._waits = [slot], False
        return inline

    def run_direct(self, plans: Sequence[CopyPlan], after: CudaFence | None) -> None:
        """Transfer each run separately."""
        stream = self._slots[0].stream
        if after is not None:
            stream.wait_event(after.event)
        try:
            for src, dst, num_bytes in map(expand, plans):
                self._driver.copy_many(dst, src, num_bytes, stream.cuda_stream)
        finally:
            self._wait()

    def run_staged(
        self, plans: Sequence[CopyPlan], host: ChunkBuffers, to_host: bool, after: CudaFence | None
    ) -> None:
        """Transfer whole chunks; a kernel copies their rows between slot and cache."""
        self._reserve_slots(host.geometry.chunk_bytes)
        slot_bytes = self._slots[0].memory.nbytes
        slots = [slot.memory.data_ptr() for slot in self._slots]
        staged = stage(plans, host, to_host, slots, slot_bytes)
        try:
            self._enqueue(plans, staged, to_host, after)
        finally:
            self._wait()

    def _enqueue(
        self, plans: Sequence[CopyPlan], staged: StagedCopy, to_host: bool, after: CudaFence | None
    ) -> None:
        first = self._slots[0].stream
        if after is not None:
            first.wait_event(after.event)
        tables = self._upload(plans, staged, first)
        self._ready.record(first)
        for slot in self._slots[1:]:
            slot.stream.wait_event(self._ready)
        kernels = [
            partial(RowCopyKernel(plan.moves, rows).launch, *table)
            for plan, rows, table in zip(plans, staged.rows, tables, strict=True)
        ]
        for tile in staged.tiles:
            stream = self._slots[tile.slot].stream
            with torch.cuda.stream(stream):
                if to_host:
                    _launch(kernels, tile)
                for each in tile.copies:
                    ends = (each.host, each.staged)
                    dst, src = ends if to_host else ends[::-1]
                    self._driver.copy(dst, src, each.num_bytes, stream.cuda_stream)
                if not to_host:
                    _launch(kernels, tile)

    def _upload(
        self, plans: Sequence[CopyPlan], staged: StagedCopy, stream: torch.cuda.Stream
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Moves and rows of each plan on the device, ordered by ``stream``."""
        pairs = [(plan.moves, rows) for plan, rows in zip(plans, staged.rows, strict=True)]
        tables = [table.ravel() for pair in pairs for table in pair]
        words = sum(table.size for table in tables)
        if words > len(self._tables):
            capacity = max(TABLE_WORDS, 2 * words)
            self._tables = torch.empty(capacity, dtype=torch.int64, device=self._device)
            self._host_tables = torch.empty(capacity, dtype=torch.int64, pin_memory=True)
            stream.wait_stream(torch.cuda.current_stream(self._device))
        np.concatenate(tables, out=self._host_tables.numpy()[:words])
        with torch.cuda.stream(stream):
            self._tables[:words].copy_(self._host_tables[:words], non_blocking=True)
        views = self._tables[:words].split([table.size for table in tables])
        return list(zip(views[::2], views[1::2], strict=True))

    def _reserve_slots(self, chunk_bytes: int) -> None:
        size = max(self._slot_bytes, chunk_bytes)
        for slot in self._slots:
            if slot.memory.nbytes < size:
                slot.memory = torch.empty(size, dtype=torch.uint8, device=self._device)
                slot.stream.wait_stream(torch.cuda.current_stream(self._device))

    def _wait(self) -> None:
        """Wait until all streams are idle, also after an error, so that no memory is in use."""
        if not self._waits:
            return
        for slot, done in zip(self._slots, self._done, strict=True):
            done.record(slot.stream)
        for done in self._done:
            done.synchronize()


def _launch(kernels: Sequence[Callable[[int, int], None]], tile: Tile) -> None:
    for kernel, (first, last) in zip(kernels, tile.rows, strict=True):
        if first < last:
            kernel(first, last)


def _the_chunks(spaces: Sequence[BlockSpace]) -> ChunkBuffers | None:
    """The chunks on the host side; ``None`` if some are blocks of a cache, or geometries differ."""
    first = spaces[0]
    if not isinstance(first, ChunkBuffers):
        return None
    for other in spaces[1:]:
        if not isinstance(other, ChunkBuffers) or other.geometry is not first.geometry:
            return None
    return first


class CudaCopier:
    """Copies for KV caches on one CUDA device."""

    shares_cores = False

    def __init__(
        self,
        device: torch.device,
        direct_min_run_bytes: int = DIRECT_MIN_RUN_BYTES,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._direct_min_run_bytes = direct_min_run_bytes
        self._driver = CudaDriver(index)
        self._pipelines = {
            way: _Pipeline(self._device, self._driver, slot_bytes) for way in ("h2d", "d2h")
        }
        self._locks = {way: threading.Lock() for way in self._pipelines}
        self._pipelines["step"] = _Pipeline(self._device, self._driver, slot_bytes, num_slots=1)

    def fence(self) -> CudaFence:
        """Mark the end of the compute stream's work so far; no synchronisation."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return CudaFence(event, self._device)

    def copy(
        self, copies: Sequence[BlockCopy], direction: Literal["h2d", "d2h"], after: Any = None
    ) -> int:
        """See :meth:`Copier.copy`."""
        with self._locks[direction], torch.cuda.device(self._device):
            return self._run(self._pipelines[direction], copies, direction == "d2h", after)

    def enqueue(self, copies: Sequence[BlockCopy]) -> QueuedCopy:
        """See :meth:`Copier.enqueue`. Call from the compute stream's thread only."""
        before = self.fence()
        with torch.cuda.device(self._device):
            pipeline = self._pipelines["step"].on_stream(torch.cuda.current_stream(self._device))
            num_bytes = self._run(pipeline, copies, False, None)
        return QueuedCopy(num_bytes, before, self.fence(), pipeline)

    def _run(
        self, pipeline: _Pipeline, copies: Sequence[BlockCopy], to_host: bool, after: Any
    ) -> int:
        ends = (self._device, _HOST) if to_host else (_HOST, self._device)
        plans = [plan for each in copies if (plan := each.plan(*ends)).num_bytes]
        if not plans:
            return 0
        hosts = [each.dst if to_host else each.src for each in copies]
        self._driver.bind()
        if (host := _the_chunks(hosts)) is not None and self._stages(plans, host, to_host):
            pipeline.run_staged(plans, host, to_host, after)
        else:
            pipeline.run_direct(plans, after)
        return sum(plan.num_bytes for plan in plans)

    def _stages(self, plans: Sequence[CopyPlan], host: ChunkBuffers, to_host: bool) -> bool:
        shortest = min(int(plan.moves[:, Move.RUN_BYTES].min()) for plan in plans)
        if shortest >= self._direct_min_run_bytes:
            return False
        return not to_host or covers_chunks(plans, host)

    def close(self) -> None:
        """Free all staging memory."""
        try:
            self.fence()
        except RuntimeError:
            # An assert on the device has ended its context. PyTorch would end the process as soon
            # as pinned memory is freed, before anybody sees the error: never free it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pipelines))
            return
        self._pipelines.clear()
        self._driver.close()
