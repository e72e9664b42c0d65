"""Small chunks, and tiers that hold them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier

# 16 tokens, 4 layers of 64 bytes, 2 heads: 8 KiB a chunk.
GEOMETRY = ChunkGeometry(
    num_tokens=16,
    layer_start=0,
    layer_widths=(64,) * 4,
    shards=(0, 1),
    num_shards_total=2,
    dtype="bfloat16",
)
PARTS = PartGeometries((GEOMETRY,))


def chunk_key(index: int) -> bytes:
    """The key of the chunk ``index``, the same in every test."""
    return random.Random(index).randbytes(CHUNK_KEY_BYTES)


def chunk_data(index: int, geometry: ChunkGeometry = GEOMETRY) -> bytes:
    """The bytes of the chunk ``index``, the same in every test: noise."""
    return random.Random(-1 - index).randbytes(geometry.chunk_bytes)


def kv_data(index: int, geometry: ChunkGeometry = GEOMETRY) -> bytes:
    """As `chunk_data`, but as compressible as a model's KV."""
    return bfloat16_bytes(index, geometry.chunk_bytes)


def config(url: str, **changes: object) -> RedisTierConfig:
    """Settings under which a head of ``GEOMETRY`` takes two values, and back-offs are short.
    Servers may take long: on a busy machine, a writer that has to wait gets little time."""
    settings: dict[str, object] = {
        "connect_timeout_seconds": 5.0,
        "read_timeout_seconds": 10.0,
        "write_timeout_seconds": 10.0,
        "max_value_bytes": 4096,
        "backoff_min_seconds": 0.02,
        "backoff_max_seconds": 0.2,
    }
    return RedisTierConfig(url=url, **(settings | changes))  # type: ignore[arg-type]


@contextmanager
def open_tier(
    url: str, geometry: ChunkGeometry = GEOMETRY, **changes: object
) -> Iterator[RedisTier]:
    """A tier with the settings of `config`; it must close in time."""
    tier = RedisTier(config(url, **changes), PartGeometries((geometry,)))
    with closing_in_time(tier):
        yield tier


@contextmanager
def closing_in_time(tier: RedisTier) -> Iterator[RedisTier]:
    try:
        yield tier
    finally:
        assert tier.close(10.0)


class Ends:
    """The ``on_done`` of several writes. ``results`` holds what it was told, in order."""

    def __init__(self) -> None:
        self.results: list[bool] = []
        self._changed = threading.Condition()

    def __call__(self, stored: bool) -> None:
        with self._changed:
            self.results.append(stored)
            self._changed.notify_all()

    def wait(self, count: int, seconds: float = 60.0) -> list[bool]:
        """Wait for ``count`` results; fail after ``seconds``."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.results) >= count, seconds)
            return list(self.results)


def put_all(
    tier: RedisTier,
    indices: range | list[int],
    make: Callable[[int, ChunkGeometry], bytes] = chunk_data,
) -> list[bool]:
    """Put the chunks of ``indices``, and wait until each is stored or given up."""
    ends = Ends()
    for order, index in enumerate(indices):
        data = memoryview(make(index, tier.geometries.largest))
        tier.put(chunk_key(index), data, ends, order)
    return ends.wait(len(indices))


def count_found(url: str, count: int) -> int:
    """How many of the first ``count`` chunks a lookup finds, up to the first that is missing."""
    with closing(RedisLookup(config(url), [PARTS])) as lookup:
        return lookup.exists_prefix([chunk_key(i) for i in range(count)], time.monotonic() + 5.0)


def get_all(
    tier: RedisTier, indices: range | list[int], seconds: float = 5.0
) -> tuple[list[bool], list[bytes]]:
    """Read the chunks of ``indices``: which are hits, and the bytes in each buffer."""
    buffers = [bytearray(tier.geometries.largest.chunk_bytes) for _ in indices]
    result = tier.read(
        [chunk_key(i) for i in indices],
        [memoryview(b) for b in buffers],
        time.monotonic() + seconds,
    )
    return result.hits, [bytes(b) for b in buffers]


def bfloat16_bytes(seed: int, num_bytes: int) -> bytes:
    """Normal numbers, each of 64 channels with a scale of its own; the same for the same seed."""
    random = np.random.default_rng(seed)
    scales = np.exp(random.standard_normal(64))
    values = random.standard_normal((-(-num_bytes // 128), 64)) * scales
    halves = (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    return bytes(halves.tobytes()[:num_bytes])
