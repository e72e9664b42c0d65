"""Chunks that wait to be written: one lane per node, one limit in bytes for all lanes together.

A full queue drops the chunk deepest in its prompt, among several the newest: a prefix is useful
without its end, an end without its prefix is not. For a chunk of a shorter lane, the longest lane
makes room, which is the slowest node's.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

logger = logging.getLogger(__name__)

OnDone = Callable[[bool], None]

MAX_LANES = 32


@dataclass(eq=False)
class PendingWrite:
    """A chunk to be written. ``buffer`` must not change before `finish`. ``order``: the chunk's
    index in its prompt. ``lane``: set by the queue."""

    key: bytes
    buffer: memoryview
    order: int
    callbacks: list[OnDone] = field(default_factory=list)
    lane: int = 0

    def finish(self, stored: bool) -> None:
        """Call the callbacks, which returns the buffer to its owner."""
        for on_done in self.callbacks:
            try:
                on_done(stored)
            except Exception:  # a caller's bug must not stop other writes
                logger.exception("on_done of a write failed")


class _Lane:
    """``waiting``: oldest first. ``num_bytes``: of waiting and taken writes."""

    def __init__(self, lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)
        self.waiting: dict[bytes, PendingWrite] = {}
        self.num_bytes = 0
        self._by_order: dict[int, dict[bytes, PendingWrite]] = {}  # none empty; newest last
        self._orders: list[int] = []  # of `_by_order`, sorted

    def add(self, write: PendingWrite) -> None:
        self.waiting[write.key] = write
        if write.order not in self._by_order:
            insort(self._orders, write.order)
        self._by_order.setdefault(write.order, {})[write.key] = write
        self.changed.notify()

    def pop_oldest(self) -> PendingWrite:
        return self._pop(next(iter(self.waiting)))

    def pop_deepest(self, num_bytes: int, order: int) -> list[PendingWrite]:
        """Writes deeper than ``order`` that free ``num_bytes``; none if they are too few."""
        deepest = list[PendingWrite]()
        orders = takewhile(lambda each: each > order, reversed(self._orders))
        for write in (write for o in orders for write in reversed(self._by_order[o].values())):
            if num_bytes <= 0:
                break
            deepest.append(write)
            num_bytes -= len(write.buffer)
        return [self._pop(write.key) for write in deepest] if num_bytes <= 0 else []

    def _pop(self, key: bytes) -> PendingWrite:
        write = self.waiting.pop(key)
        same = self._by_order[write.order]
        del same[key]
        if not same:
            del self._by_order[write.order]
            del self._orders[bisect_left(self._orders, write.order)]
        return write


class WriteQueue:
    """Holds up to ``max_bytes`` of chunks; taken writes count until they are finished.
    Thread-safe; no call but `close` is linear in the number of waiting writes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._emptied = threading.Condition(self._lock)
        self._lanes = [_Lane(self._lock) for _ in range(MAX_LANES)]
        self._pending: dict[bytes, PendingWrite] = {}  # waiting or taken
        self._num_bytes = 0
        self._closed = False

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def room_bytes(self) -> int:
        return self._max_bytes - self._num_bytes

    def lane_bytes(self, lane: int) -> int:
        return self._lanes[lane].num_bytes

    def offer(self, write: PendingWrite, lane: int = 0) -> list[PendingWrite]:
        """Queue ``write``. Returns the writes dropped for lack of room, maybe ``write`` itself; the
        caller finishes them. If the chunk is queued already, that entry gets the callbacks."""
        with self._lock:
            if self._closed:
                return [write]
            if (other := self._pending.get(write.key)) is not None:
                other.callbacks += write.callbacks
                return []
            dropped = self._make_room(write, self._lanes[lane])
            if dropped != [write]:
                self._pending[write.key] = write
                self._add(write, lane)
            return dropped

    def take(self, max_bytes: int, timeout: float, number: int = 0) -> list[PendingWrite]:
        """The oldest writes of a lane, until they reach ``max_bytes``; at least one. Empty after
        ``timeout`` seconds."""
        with self._lock:
            lane = self._lanes[number]
            if not lane.waiting and not self._closed:
                lane.changed.wait(timeout)
            size, taken = 0, list[PendingWrite]()
            while lane.waiting and (not taken or size < max_bytes):
                taken.append(lane.pop_oldest())
                size += len(taken[-1].buffer)
            return taken

    def move(self, write: PendingWrite, lane: int) -> bool:
        """Requeue a taken write in another lane, as its newest. False if the queue is closed: the
        caller finishes the write."""
        with self._lock:
            if self._closed:
                return False
            self._count(self._lanes[write.lane], -len(write.buffer))
            self._add(write, lane)
            return True

    def finish(self, write: PendingWrite, stored: bool) -> None:
        """End a taken write: call its callbacks, then free its room."""
        with self._lock:
            del self._pending[write.key]  # from here on, `offer` adds no callbacks
        write.finish(stored)
        with self._lock:
            self._count(self._lanes[write.lane], -len(write.buffer))

    def wait_empty(self, timeout: float) -> bool:
        """False if the queue is not empty within ``timeout`` seconds."""
        with self._lock:
            return self._emptied.wait_for(lambda: not self._num_bytes, timeout)

    def close(self) -> list[PendingWrite]:
        """Accept no more writes. Returns those not yet taken; the caller finishes them."""
        with self._lock:
            self._closed = True
            left = []
            for lane in self._lanes:
                left += self._forget(lane, [lane.pop_oldest() for _ in range(len(lane.waiting))])
                lane.changed.notify_all()
            return left

    def _add(self, write: PendingWrite, lane: int) -> None:
        write.lane = lane
        self._count(self._lanes[lane], len(write.buffer))
        self._lanes[lane].add(write)

    def _count(self, lane: _Lane, num_bytes: int) -> None:
        lane.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if not self._num_bytes:
            self._emptied.notify_all()

    def _forget(self, lane: _Lane, writes: list[PendingWrite]) -> list[PendingWrite]:
        for write in writes:
            del self._pending[write.key]
            self._count(lane, -len(write.buffer))
        return writes

    def _make_room(self, write: PendingWrite, lane: _Lane) -> list[PendingWrite]:
        """The writes dropped to make ``write`` fit, or ``write`` itself if it cannot fit."""
        excess = self._num_bytes + len(write.buffer) - self._max_bytes
        if excess <= 0:
            return []
        longest = max(self._lanes, key=lambda each: each.num_bytes)
        victims = list[PendingWrite]()
        if longest.num_bytes > lane.num_bytes + len(write.buffer):
            victims = self._forget(longest, longest.pop_deepest(excess, order=-1))
        return victims or self._forget(lane, lane.pop_deepest(excess, write.order)) or [write]
