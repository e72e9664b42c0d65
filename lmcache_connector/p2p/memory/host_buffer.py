"""Host memory for KV on its way, bounded in bytes.

Memory is taken from the lowest place that fits in one large allocation, so that pages touched once
are used again. What does not fit there comes from the overflow: allocations of their own, up to a
second bound. Beyond that there is none, and the caller has to wait or do without.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

_ALIGNMENT = 4096


@dataclass(eq=False)
class Region:
    """``view`` is writable and ``num_bytes`` long. Given back once, to its buffer."""

    num_bytes: int
    tensor: torch.Tensor
    view: memoryview = field(init=False)
    offset: int | None = None  # in the large allocation; None: overflow

    def __post_init__(self) -> None:
        self.view = memoryview(self.tensor.numpy()).cast("B")

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())


class FreeList:
    """Which parts of ``size`` bytes are free. Pure arithmetic."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)] if size else []

    def take(self, size: int) -> int | None:
        """The lowest offset where ``size`` bytes are free."""
        for index, (start, length) in enumerate(self._free):
            if length >= size:
                rest = [(start + size, length - size)] if length > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Joins with its free neighbours. Raises ``ValueError`` for what is free already."""
        index = next((i for i, (at, _) in enumerate(self._free) if at > start), len(self._free))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        if (before and sum(before) > start) or (after and start + size > after[0]):
            raise ValueError("given back twice")
        first, last = index, index
        if before and sum(before) == start:
            start, size, first = before[0], size + before[1], index - 1
        if after and start + size == after[0]:
            size, last = size + after[1], index + 1
        self._free[first:last] = [(start, size)]

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self._free)

    @property
    def largest(self) -> int:
        """Of the parts that are free."""
        return max((length for _, length in self._free), default=0)


class HostBuffer:
    """Thread-safe. ``pinned``: for copies to and from a GPU."""

    def __init__(self, capacity_bytes: int, overflow_bytes: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._capacity = capacity_bytes // _ALIGNMENT * _ALIGNMENT
        self._memory = self._allocate(self._capacity)
        self._overflow_left = overflow_bytes
        self._overflow = overflow_bytes
        self._free = FreeList(self._capacity)
        self._lock = threading.Lock()

    @property
    def place(self) -> tuple[int, int]:
        """Address and bytes of the large allocation."""
        return self._memory.data_ptr(), self._capacity

    @property
    def capacity_bytes(self) -> int:
        """With the overflow."""
        return self._capacity + self._overflow

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self.capacity_bytes - self._free.num_free - self._overflow_left

    def take(self, num_bytes: int) -> Region | None:
        """``None``: there is no room now."""
        if num_bytes <= 0:
            raise ValueError(f"cannot allocate {num_bytes} bytes")
        size = _aligned(num_bytes)
        with self._lock:
            offset = self._free.take(size)
            if offset is None:
                if num_bytes > self._overflow_left:
                    return None
                self._overflow_left -= num_bytes
        if offset is None:
            return Region(num_bytes, self._allocate(num_bytes))
        return Region(num_bytes, self._memory[offset : offset + num_bytes], offset)

    def has_room(self, num_bytes: int) -> bool:
        """Whether :meth:`take` finds some now."""
        with self._lock:
            return _aligned(num_bytes) <= self._free.largest or num_bytes <= self._overflow_left

    def give(self, region: Region) -> None:
        with self._lock:
            if region.offset is None:
                self._overflow_left += region.num_bytes
            else:
                self._free.give(region.offset, _aligned(region.num_bytes))

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
