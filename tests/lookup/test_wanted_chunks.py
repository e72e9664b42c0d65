from __future__ import annotations

from lmcache_connector.lookup.chunk_index import INTERVAL_SECONDS, ChunkIndex, WantedChunks
from lmcache_connector.plans import CacheEvent
from tests.support.clock import Clock

KEYS = [i.to_bytes(32, "big") for i in range(600)]


def index_of(keys: list[bytes]) -> ChunkIndex:
    index = ChunkIndex(1)
    index.apply(0, [CacheEvent(key, admitted=True) for key in keys])
    return index


def test_chunks_in_memory_are_told_of_once_in_a_while() -> None:
    clock = Clock()
    wanted = WantedChunks(index_of(KEYS[:3]), clock)
    wanted.sight(KEYS[:5])
    assert wanted.take() == tuple(KEYS[:3])
    wanted.sight(KEYS[:5])
    assert wanted.take() == ()
    clock.now += INTERVAL_SECONDS
    wanted.sight(KEYS[1:5])
    assert wanted.take() == tuple(KEYS[1:3])


def test_what_expires_soon_is_told_of_several_times_in_its_life() -> None:
    clock = Clock()
    wanted = WantedChunks(index_of(KEYS[:3]), clock, ttl_seconds=6.0)
    told = 0
    for _ in range(60):
        wanted.sight(KEYS[:3])
        told += len(wanted.take())
        clock.now += 0.1
    assert told == 3 * 3


def test_a_plan_tells_of_a_bounded_number() -> None:
    wanted = WantedChunks(index_of(KEYS), Clock())
    wanted.sight(KEYS)
    first = wanted.take()
    assert first == tuple(KEYS[:256])
    wanted.sight(KEYS)
    assert wanted.take() == tuple(KEYS[256:512]), "the next request goes on where it ended"
