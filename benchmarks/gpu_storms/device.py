"""A simulated GPU: one compute stream, a bus with two directions, and the contents of its memory.

Forward passes run on the compute stream one after the other, while the host goes on. A fence is a
place in that stream. Copies run beside it at the speed of the bus, one at a time in each direction,
and their callers wait for them, as with `CudaCopier`.

Memory has no bytes: a block has one value, the digest of all tokens up to its end. A copy into
blocks that a pass under way still uses is an error, and so is a pass over wrong KV.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_storms.passes import DeviceSpeed, GpuShape, Work
from lmcache_connector.copy_kv_blocks.copier import QueuedCopy
from lmcache_connector.worker import rank_tiers
from lmcache_connector.worker.self_test import SelfTestResult
from tests.simulation import lmcache_model, stdlib
from tests.simulation.kernel import Kernel, SimulationFailure

_MAP_NORESERVE = 0x4000  # Linux; in Python since 3.13


@dataclass(frozen=True, slots=True)
class DeviceFence:
    """A place in the compute stream, reached at ``at``."""

    kernel: Kernel
    at: float

    def query(self) -> bool:
        return self.kernel.now >= self.at

    def elapsed_time(self, end: DeviceFence, /) -> float:
        return 1000 * (end.at - self.at)


@dataclass(frozen=True, slots=True)
class SimulatedPass:
    """Occupies the compute stream until ``ends_at``."""

    device: Device
    ends_at: float
    blocks: frozenset[int]

    def wait(self) -> None:
        kernel = self.device.kernel
        if kernel.now < self.ends_at:
            kernel.sleep(self.ends_at - kernel.now + self.device.late())


@dataclass
class Device:
    """The compute stream and the blocks of one GPU. Its ``kv_caches`` are address space, never
    touched."""

    kernel: Kernel
    speed: DeviceSpeed
    kv_caches: dict[str, torch.Tensor] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)
    _free_at: float = 0.0
    _passes: deque[SimulatedPass] = field(default_factory=deque)

    def launch(
        self, seconds: float, blocks: Collection[int], works: Sequence[Work]
    ) -> SimulatedPass:
        self._free_at = ends_at = max(self._free_at, self.kernel.now) + seconds
        launched = SimulatedPass(self, ends_at, frozenset(blocks))
        self._passes.append(launched)
        for work in works:
            self.kernel.at(ends_at - seconds / 2, partial(self._check, work))
            self.kernel.at(ends_at, partial(self._write, work))
        return launched

    def queue(self, seconds: float, work: Callable[[], None]) -> None:
        """Behind all passes launched so far, before the next one: ``work`` has ended by then."""
        self._free_at = max(self._free_at, self.kernel.now) + seconds
        self.kernel.at(self._free_at, work)

    def busy_seconds(self) -> float:
        return max(0.0, self._free_at - self.kernel.now)

    def fence(self) -> DeviceFence:
        return DeviceFence(self.kernel, max(self._free_at, self.kernel.now))

    def late(self) -> float:
        """Seconds until the host learns of an event."""
        return self.kernel.chance.random() * self.speed.late_seconds

    def check_unused(self, blocks: Sequence[int]) -> None:
        """No pass under way may use blocks that are about to be overwritten."""
        while self._passes and self._passes[0].ends_at <= self.kernel.now:
            self._passes.popleft()
        for one in self._passes:
            if not one.blocks.isdisjoint(blocks):
                raise SimulationFailure("WRONG BYTES: a load overwrites what a pass still uses")

    def _check(self, work: Work) -> None:
        blocks, digests = work.before()
        if [self.blocks.get(block) for block in blocks] != list(digests):
            self.kernel.fail(f"WRONG BYTES: {work.request_id} computes on wrong KV")

    def _write(self, work: Work) -> None:
        self.blocks.update(zip(*work.written(), strict=True))


def install(device: Device, shape: GpuShape) -> None:
    """Replaces doubles of `tests.simulation.setup`: memory without bytes, and copies that take the
    bus' time."""
    device.kv_caches = _address_space(shape)
    vars(lmcache_model)["Pool"] = AddressPool
    worker, speed = vars(rank_tiers), device.speed
    copier = DeviceCopier(device)
    worker["make_copier"] = lambda _: copier

    def self_test(engine: Any, parts: Sequence[Any], clock: Any, **more: Any) -> SelfTestResult:
        num_bytes = parts[0].geometry.chunk_bytes
        seconds = speed.copy_seconds + num_bytes / speed.bus_bytes_per_second
        return SelfTestResult(num_bytes, seconds, seconds)

    worker["run_self_test"] = self_test


def _address_space(shape: GpuShape) -> dict[str, torch.Tensor]:
    size, flags = shape.cache_size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    caches = {}
    for name in shape.layer_names:
        memory = np.frombuffer(mmap.mmap(-1, 2 * int(np.prod(size)), flags=flags), np.int16)
        caches[name] = torch.from_numpy(memory).view(torch.bfloat16).view(size)
    return caches


class DeviceCopier:
    """Copies between a device's blocks and LMCache's chunks, with `CudaCopier`'s interface."""

    shares_cores = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host: dict[int, int] = {}  # by the block's place in host memory
        self._locks = {"h2d": stdlib.Lock(), "d2h": stdlib.Lock()}

    def fence(self) -> DeviceFence:
        return self._device.fence()

    def copy(self, copies: Sequence[Any], direction: str, after: Any = None) -> int:
        kernel, speed = self._device.kernel, self._device.speed
        num_bytes = sum(_num_bytes(copy) for copy in copies)
        with self._locks[direction]:
            if after is not None and not after.query():
                kernel.sleep(after.at - kernel.now)
            for copy in copies:
                self._move(copy, direction)
            is_load = direction == "h2d"
            bus = speed.bus_bytes_per_second if is_load else speed.store_bytes_per_second
            kernel.sleep(speed.copy_seconds + num_bytes / bus)
            kernel.sleep(self._device.late())
            for copy in copies:
                self._move(copy, direction)
        return num_bytes

    def enqueue(self, copies: Sequence[Any]) -> QueuedCopy:
        num_bytes, speed = sum(map(_num_bytes, copies)), self._device.speed
        before, seconds = self.fence(), speed.copy_seconds + num_bytes / speed.bus_bytes_per_second
        self._device.queue(seconds, partial(self._bring, copies))
        return QueuedCopy(num_bytes, before, self.fence())

    def close(self) -> None:
        """Frees nothing."""

    def _bring(self, copies: Sequence[Any]) -> None:
        for copy in copies:
            places = _places(copy.src, copy.src_block_ids)
            for place, block in zip(places, copy.dst_block_ids, strict=True):
                self._device.blocks[block] = self._host[place]

    def _move(self, copy: Any, direction: str) -> None:
        """Called when a copy begins and when it ends: its blocks must be unused all the time."""
        device = self._device.blocks
        if direction == "h2d":
            self._device.check_unused(copy.dst_block_ids)
            places = _places(copy.src, copy.src_block_ids)
            for place, block in zip(places, copy.dst_block_ids, strict=True):
                device[block] = self._host[place]
        else:
            places = _places(copy.dst, copy.dst_block_ids)
            for block, place in zip(copy.src_block_ids, places, strict=True):
                self._host[place] = device.get(block, 0)


def _places(chunks: Any, block_ids: Sequence[int]) -> list[int]:
    """A number for each of these blocks of chunks: its chunk's address plus its place there."""
    chunk, block = np.divmod(np.asarray(block_ids, np.int64), chunks.blocks_per_chunk)
    return [int(place) for place in chunks.addresses[chunk] + block]


def _num_bytes(copy: Any) -> int:
    chunks = copy.src if hasattr(copy.src, "geometry") else copy.dst
    return (
        len(copy.src_block_ids) * int(chunks.geometry.chunk_bytes) // int(chunks.blocks_per_chunk)
    )


class AddressPool:
    """LMCache's chunks as addresses without bytes, in the place of `lmcache_model.Pool`."""

    def __init__(self, num_chunks: int, chunk_bytes: int) -> None:
        self.num_chunks = num_chunks
        self._chunk_bytes = chunk_bytes
        self._free = [(1 + i) * chunk_bytes for i in range(num_chunks)]

    @property
    def total_allocated_size(self) -> int:
        """In bytes."""
        return (self.num_chunks - self.num_free) * self._chunk_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> AddressChunk | None:
        if not self._free:
            return None
        return AddressChunk(self._free.pop(), self._chunk_bytes, self._free.append)


@dataclass
class AddressChunk:
    """One chunk of an :class:`AddressPool`, with its reference count."""

    data_ptr: int
    num_bytes: int
    give_back: Callable[[int], None]
    num_references: int = 1

    @property
    def can_evict(self) -> bool:
        return self.num_references == 1

    def get_physical_size(self) -> int:
        return self.num_bytes

    def ref_count_up(self) -> None:
        self.num_references += 1

    def ref_count_down(self) -> None:
        self.num_references -= 1
        if self.num_references == 0:
            self.give_back(self.data_ptr)
