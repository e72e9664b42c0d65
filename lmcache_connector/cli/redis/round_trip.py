"""Chunks of random bytes through the engine's own Redis tier: does it work, and how fast?"""

from __future__ import annotations

import os
import time

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.counters import WriteEnd
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.storage.redis.value_names import chunk_tag, claim_suffix, stripe_suffix

_TOKENS = 256
_LAYERS = 16


class RoundTrip:
    """Some chunks of about ``chunk_bytes`` each. A context manager, connected while inside.

    Keys are random, so nobody else's chunks are touched. What was written stays until the caller
    removes ``names``.
    """

    def __init__(self, config: RedisTierConfig, chunk_bytes: int = 1 << 20) -> None:
        width = max(1, chunk_bytes // (_TOKENS * _LAYERS))
        self._geometry = ChunkGeometry(_TOKENS, 0, (width,) * _LAYERS, (0,), 1, "uint8")
        self.chunk_bytes = self._geometry.chunk_bytes
        self.keys: list[bytes] = []
        self._data: list[bytes] = []
        self._config = config

    def __enter__(self) -> RoundTrip:
        geometries = PartGeometries((self._geometry,))
        self._tier = RedisTier(self._config, geometries)
        self._lookup = RedisLookup(self._config, [geometries])
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._lookup.close()
        self._tier.close(1.0)

    @property
    def names(self) -> list[bytes]:
        """The names in Redis of everything that was written, claims included."""
        stripes = self._geometry.stripes(self._config.max_payload_bytes)
        suffixes = [*map(stripe_suffix, stripes), claim_suffix(stripes[0])]
        tags = [chunk_tag(self._config.namespace, key) for key in self.keys]
        return [tag + suffix for tag in tags for suffix in suffixes]

    @property
    def why(self) -> str:
        """What the tier says about what did not work."""
        stats = self._tier.stats()
        writes = stats.counts.writes
        not_written = writes[WriteEnd.FAILED] + writes[WriteEnd.QUEUE_FULL]
        reasons = {**stats.counts.misses, "not written": not_written}
        found = ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count)
        paused = "; the server refuses writes" if stats.writes_paused else ""
        return (found or "no answer in time") + paused

    def write(self, count: int, seconds: float) -> bool:
        """Write chunks, and wait until they are there."""
        stored: list[bool] = []
        for order in range(count):
            self.keys.append(os.urandom(CHUNK_KEY_BYTES))
            self._data.append(os.urandom(self.chunk_bytes))
            self._tier.put(self.keys[-1], memoryview(self._data[-1]), stored.append, order)
        return self._tier.flush(seconds) and all(stored)

    def found(self, seconds: float) -> int:
        """How many of the chunks are said to be there."""
        return self._lookup.exists_prefix(self.keys, time.monotonic() + seconds)

    def read(self, seconds: float, count: int | None = None) -> bool:
        """Read chunks and compare every byte."""
        buffers = [bytearray(self.chunk_bytes) for _ in self.keys[:count]]
        until = time.monotonic() + seconds
        views = [memoryview(buffer) for buffer in buffers]
        hits = self._tier.read(self.keys[:count], views, until).hits
        return all(hits) and buffers == self._data[: len(buffers)]
