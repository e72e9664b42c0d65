"""Chunks that requests want and memory holds: Redis should hold them too.

A chunk found in memory is not asked for in Redis, so nobody would notice that it is missing there.
The workers are told of it now and then, and see to it; see `worker.offers`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache_connector.lookup.chunk_index import ChunkIndex

INTERVAL_SECONDS = 15.0
"""A chunk is told of once in that time, however many requests want it."""
_MAX_PER_STEP = 256
_MAX_TRACKED = 1 << 16


class WantedChunks:
    """Remembers the chunks told of last. O(1) per chunk. ``clock`` returns seconds. ``has_news``:
    whether there is something to take.

    Chunks that live in Redis for ``ttl_seconds`` are told of several times in their lives.
    """

    def __init__(
        self, index: ChunkIndex, clock: Callable[[], float], ttl_seconds: float | None = None
    ) -> None:
        self._index = index
        self._clock = clock
        self._interval_seconds = INTERVAL_SECONDS
        if ttl_seconds is not None:
            self._interval_seconds = min(INTERVAL_SECONDS, ttl_seconds / 3)
        self._told_at: OrderedDict[bytes, float] = OrderedDict()
        self._news: list[bytes] = []
        self.has_news = False

    def sight(self, keys: Sequence[bytes]) -> None:
        """A request has this prompt."""
        now = self._clock()
        for key, is_held in zip(keys, self._index.has_each(keys), strict=True):
            if len(self._news) >= _MAX_PER_STEP:
                return
            if is_held and now - self._told_at.get(key, float("-inf")) >= self._interval_seconds:
                self._told_at[key] = now
                self._told_at.move_to_end(key)
                self._news.append(key)
                self.has_news = True
        while len(self._told_at) > _MAX_TRACKED:
            self._told_at.popitem(last=False)

    def take(self) -> tuple[bytes, ...]:
        """What there is to tell the workers, at most 256 chunks."""
        news, self._news = tuple(self._news), []
        self.has_news = False
        return news
