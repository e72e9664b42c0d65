"""A simulated GPU: one compute stream, a bus with two directions, and what its memory holds.

Forward passes queue on the compute stream and run one after the other; the host goes on meanwhile.
A fence is a place in that stream. Copies run beside it at the speed of the bus, one at a time in
each direction, and whoever asked for one waits for it, as `CudaCopier` has it.

Memory is not there: a block holds one value, the digest of all tokens up to its end. A copy into
blocks that a pass under way still uses is a broken promise, and so is a pass over wrong KV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.simulation import stdlib
from tests.simulation.kernel import Kernel, SimulationFailure


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """``step_seconds`` is a forward pass that computes next to nothing; each token of a prompt adds
    ``token_seconds``, and ``pair_seconds`` for each token before it. ``late_seconds``: the host
    learns that much later, at most, that something has ended."""

    step_seconds: float = 0.010
    token_seconds: float = 30e-6
    pair_seconds: float = 1e-9
    bus_bytes_per_second: float = 25e9
    copy_seconds: float = 100e-6
    late_seconds: float = 200e-6

    def pass_seconds(self, spans: Sequence[tuple[int, int]]) -> float:
        """Of a pass that computes tokens ``[start, end)`` of each of these requests."""
        seconds = self.step_seconds
        for start, end in spans:
            if end - start > 1:
                pairs = (end - start) * (start + end) / 2
                seconds += (end - start) * self.token_seconds + pairs * self.pair_seconds
        return seconds


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
class _Pass:
    """A forward pass on the compute stream, until ``ends_at``."""

    ends_at: float
    blocks: frozenset[int]


@dataclass
class Device:
    """The compute stream and the blocks of one GPU."""

    kernel: Kernel
    speed: DeviceSpeed
    blocks: dict[int, int] = field(default_factory=dict)
    _free_at: float = 0.0
    _passes: deque[_Pass] = field(default_factory=deque)

    def launch(self, seconds: float, blocks: frozenset[int]) -> float:
        """Queue a pass that uses ``blocks``; when it will have ended."""
        self._free_at = max(self._free_at, self.kernel.now) + seconds
        self._passes.append(_Pass(self._free_at, blocks))
        return self._free_at

    def fence(self) -> DeviceFence:
        return DeviceFence(self.kernel, max(self._free_at, self.kernel.now))

    def late(self) -> float:
        """Seconds until the host learns of something."""
        return self.kernel.chance.random() * self.speed.late_seconds

    def check_unused(self, blocks: Sequence[int]) -> None:
        """No pass under way may use what is about to be overwritten."""
        while self._passes and self._passes[0].ends_at <= self.kernel.now:
            self._passes.popleft()
        for one in self._passes:
            if not one.blocks.isdisjoint(blocks):
                raise SimulationFailure("WRONG BYTES: a load overwrites what a pass still uses")


class DeviceCopier:
    """Between the blocks of a device and LMCache's chunks: `CudaCopier`, as far as others see."""

    shares_cores = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host: dict[int, int] = {}  # by a block's place in host memory
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
            kernel.sleep(speed.copy_seconds + num_bytes / speed.bus_bytes_per_second)
            kernel.sleep(self._device.late())
            for copy in copies:
                self._move(copy, direction)
        return num_bytes

    def close(self) -> None:
        """Nothing is held."""

    def _move(self, copy: Any, direction: str) -> None:
        """Called when a copy begins and when it ends: its blocks must be its own all the time."""
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
    """Where in host memory these blocks of chunks stand."""
    chunk, block = np.divmod(np.asarray(block_ids, np.int64), chunks.blocks_per_chunk)
    return [int(place) for place in chunks.addresses[chunk] + block]


def _num_bytes(copy: Any) -> int:
    chunks = copy.src if hasattr(copy.src, "addresses") else copy.dst
    return (
        len(copy.src_block_ids) * int(chunks.geometry.chunk_bytes) // int(chunks.blocks_per_chunk)
    )


class AddressPool:
    """Chunks of LMCache's memory that have an address and no bytes: stands in the place of
    `lmcache_model.Pool`."""

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
    """One chunk of an :class:`AddressPool`, and how many refer to it."""

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
