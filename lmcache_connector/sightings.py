"""Which chunks more than one request has wanted: those are worth a place in Redis."""

from __future__ import annotations

from collections import OrderedDict

_MAX_CHUNKS = 1 << 18  # about 40 MB; with 256 tokens each, 67 million tokens


class Sightings:
    """Counts to two, for the ``capacity`` chunks seen last. O(1) per chunk. Not thread-safe."""

    def __init__(self, capacity: int = _MAX_CHUNKS) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[bytes, bool] = OrderedDict()  # key -> seen twice

    def is_second(self, key: bytes) -> bool:
        """True the second time a chunk is seen, and only then."""
        twice = self._seen.get(key)
        self._seen[key] = twice is not None
        self._seen.move_to_end(key)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return twice is False
