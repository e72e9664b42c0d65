"""Chunks by how long they have lain unused, with priorities."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator


class AgeQueues:
    """Keys in the order in which they may go. A chunk of priority p ages ``2**p`` times slower.

    Every operation is O(1); :meth:`oldest_first` costs a comparison per priority in use for each
    key it yields. Not thread-safe.
    """

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[bytes, float]] = {}  # key -> when it was used last

    def put(self, key: bytes, priority: int, now: float) -> None:
        """Make it the newest of its priority. It must not be here yet."""
        self._queues.setdefault(priority, OrderedDict())[key] = now

    def discard(self, key: bytes, priority: int) -> None:
        """It may be missing."""
        queue = self._queues.get(priority)
        if queue is not None and queue.pop(key, None) is not None and not queue:
            del self._queues[priority]

    def oldest_first(self, now: float) -> Iterator[bytes]:
        """Of keys of the same age, those of low priority first. Nothing may change meanwhile."""
        if len(self._queues) == 1:
            return iter(*self._queues.values())
        queues = [self._weighed(priority, now) for priority in sorted(self._queues)]
        return (key for _, key in heapq.merge(*queues, key=lambda item: item[0]))

    def _weighed(self, priority: int, now: float) -> Iterator[tuple[float, bytes]]:
        slowness = 2.0**-priority
        return (((used - now) * slowness, key) for key, used in self._queues[priority].items())
