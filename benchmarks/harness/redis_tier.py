"""The Redis tier alone. Work that fails in part raises ``RuntimeError``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.harness.ratios import median_seconds
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier

_SECONDS = 60.0


@contextmanager
def open_tier(url: str, geometry: ChunkGeometry) -> Iterator[RedisTier]:
    tier = RedisTier(RedisTierConfig(url=url), PartGeometries((geometry,)))
    try:
        yield tier
    finally:
        tier.close(1.0)


@contextmanager
def open_lookup(url: str, geometry: ChunkGeometry) -> Iterator[RedisLookup]:
    lookup = RedisLookup(RedisTierConfig(url=url), [PartGeometries((geometry,))])
    try:
        yield lookup
    finally:
        lookup.close()


def write_all(tier: RedisTier, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> None:
    """Returns once all chunks are in Redis, whichever instance wrote them."""
    left = threading.Semaphore(0)
    stored: list[bool] = []

    def on_done(success: bool) -> None:
        stored.append(success)
        left.release()

    for order, (key, chunk) in enumerate(zip(keys, chunks, strict=True)):
        tier.put(key, chunk, on_done, order)
    if not all(left.acquire(timeout=_SECONDS) for _ in keys):
        raise RuntimeError("a write does not end")
    if not all(stored):
        raise RuntimeError(f"writes failed: {tier.stats()}")


def read_all(tier: RedisTier, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
    if not all(tier.read(keys, targets, time.monotonic() + _SECONDS).hits):
        raise RuntimeError(f"reads failed: {tier.stats()}")


def look_up_all(lookup: RedisLookup, keys: Sequence[bytes]) -> None:
    found = lookup.exists_prefix(keys, time.monotonic() + _SECONDS)
    if found != len(keys):
        raise RuntimeError(f"{found} of {len(keys)} chunks found")


def lookup_seconds(lookup: RedisLookup, keys: Sequence[bytes], repeats: int) -> float:
    """Median time of a lookup of ``keys``, all hits."""
    return median_seconds(lambda: look_up_all(lookup, keys), repeats)
