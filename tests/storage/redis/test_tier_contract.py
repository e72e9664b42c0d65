"""What the tier promises, over each server and each form of values."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.storage.tier import WritableTier
from tests.support.redis.chunks import PARTS, Ends, chunk_key, config, kv_data
from tests.support.redis.servers import Server, running_server


@pytest.fixture(scope="module")
def oldest_redis(oldest_redis_path: str) -> Iterator[Server]:
    with running_server(oldest_redis_path) as server, server.client() as client:
        assert str(client.info("server")["redis_version"]).startswith("6.2.")
        yield server


@pytest.fixture(params=["valkey", "valkey, keyed", "valkey, compressed", "oldest_redis"])
def tier(request: pytest.FixtureRequest) -> Iterator[WritableTier]:
    name, _, kind = request.param.partition(", ")
    hash_key = b"0123456789abcdef" if kind == "keyed" else None
    codec = "blosc2" if kind == "compressed" else "none"
    server: Server = request.getfixturevalue(name)
    tier = RedisTier(config(server.url, hash_key=hash_key, codec=codec), PARTS)
    yield tier
    assert tier.close(1.0)


def put(tier: WritableTier, indices: Sequence[int]) -> list[bool]:
    ends = Ends()
    for order, index in enumerate(indices):
        assert tier.put(chunk_key(index), memoryview(kv_data(index)), ends, order)
    return ends.wait(len(indices))


def get(tier: WritableTier, indices: Sequence[int], seconds: float = 5.0) -> list[bytes | None]:
    """Bytes of the hits, None for the misses."""
    buffers = [bytearray(tier.geometries.largest.chunk_bytes) for _ in indices]
    keys = [chunk_key(i) for i in indices]
    deadline = time.monotonic() + seconds
    hits = tier.read(keys, [memoryview(b) for b in buffers], deadline).hits
    assert len(hits) == len(indices)
    return [bytes(b) if hit else None for hit, b in zip(hits, buffers, strict=True)]


def test_an_empty_tier_hits_nothing(tier: WritableTier) -> None:
    assert get(tier, [0, 1]) == [None, None]
    assert get(tier, []) == []


def test_a_hit_is_byte_equal(tier: WritableTier) -> None:
    assert put(tier, [0, 1, 2]) == [True] * 3
    assert get(tier, [2, 0, 1]) == [kv_data(2), kv_data(0), kv_data(1)]


def test_the_same_chunk_may_be_asked_for_twice(tier: WritableTier) -> None:
    put(tier, [0])
    assert get(tier, [0, 0]) == [kv_data(0)] * 2


def test_what_is_there_is_not_overwritten(tier: WritableTier) -> None:
    put(tier, [0])
    ends = Ends()
    tier.put(chunk_key(0), memoryview(kv_data(1)), ends)
    ends.wait(1)
    assert get(tier, [0]) == [kv_data(0)]


def test_past_its_deadline_nothing_is_a_hit(tier: WritableTier) -> None:
    put(tier, [0])
    assert get(tier, [0], seconds=-1.0) == [None]


def test_misused_it_raises(tier: WritableTier) -> None:
    with pytest.raises(ValueError, match="keys"):
        tier.read([chunk_key(0)], [], time.monotonic() + 1.0)


def test_closed_it_is_a_miss_and_every_put_still_ends(tier: WritableTier) -> None:
    put(tier, [0])
    assert tier.close(1.0)
    assert get(tier, [0]) == [None]
    ends = Ends()
    assert not tier.put(chunk_key(1), memoryview(kv_data(1)), ends)
    assert ends.results == [False]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(stored=st.sets(st.integers(100, 115)), asked=st.lists(st.integers(100, 115), max_size=12))
def test_the_leading_hits_are_those_that_were_put(
    shared_valkey: Server, stored: set[int], asked: list[int]
) -> None:
    with shared_valkey.client() as client:
        client.flushall()
    tier = RedisTier(config(shared_valkey.url), PARTS)
    put(tier, sorted(stored))
    found = get(tier, asked)
    end = next((i for i, index in enumerate(asked) if index not in stored), len(asked))
    assert found[:end] == [kv_data(i) for i in asked[:end]]
    for index, data in zip(asked[end:], found[end:], strict=True):
        assert data is None or data == kv_data(index)
    assert end == len(asked) or found[end] is None
    tier.close(1.0)
