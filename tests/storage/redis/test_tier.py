"""The Redis tier on a real server: a read returns the bytes that were put, or a miss."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.storage.redis import pending_read
from lmcache_connector.storage.redis.counters import WriteEnd
from lmcache_connector.storage.redis.pending_read import PendingRead, ValueRequest
from lmcache_connector.storage.redis.tier import RedisTier
from tests.support.clock import wait_until
from tests.support.redis.chunks import (
    GEOMETRY,
    PARTS,
    Ends,
    chunk_data,
    chunk_key,
    config,
    get_all,
    kv_data,
    open_tier,
    put_all,
)
from tests.support.redis.servers import Server, running_server


@pytest.fixture(params=["tcp", "unix"])
def url(request: pytest.FixtureRequest, valkey: Server) -> str:
    return valkey.url if request.param == "tcp" else valkey.unix_url


def test_big_values_come_back(valkey: Server) -> None:
    # A chunk of an 8B model: 8 heads of 4 MiB, two values each.
    big = ChunkGeometry(256, 0, (512,) * 32, tuple(range(8)), 8, "bfloat16")
    with open_tier(valkey.url, big, max_value_bytes=4 << 20) as tier:
        assert put_all(tier, range(2)) == [True] * 2
        hits, data = get_all(tier, range(2))
        assert hits == [True] * 2
        assert data == [chunk_data(i, big) for i in range(2)]
    with valkey.client() as client:
        lengths = [client.strlen(key) for key in client.keys("lmc:*-*")]
    assert len(lengths) == 32
    assert max(lengths) <= 4 << 20


def test_values_that_no_reader_accepts_are_refused_at_start() -> None:
    """Values of several layers are kept small, but a single layer is never split."""
    layers = (1 << 20,) * 4
    with open_tier("redis://127.0.0.1:1", ChunkGeometry(64, 0, layers, (0,), 1, "uint8")):
        pass
    with (
        pytest.raises(ValueError, match="use a smaller chunk_size"),
        open_tier("redis://127.0.0.1:1", ChunkGeometry(65, 0, layers, (0,), 1, "uint8")),
    ):
        pass


def test_each_value_is_written_once(valkey: Server) -> None:
    with open_tier(valkey.url) as one, open_tier(valkey.url) as other:
        assert put_all(one, range(5)) == [True] * 5
        assert put_all(other, range(5)) == [True] * 5
        assert other.stats().counts.writes[WriteEnd.ALREADY_THERE] == 5
        assert other.stats().counts.bytes_written == 0


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_writers_have_the_same_priority_whoever_starts_them(valkey: Server) -> None:
    """The writer of a cluster's first node starts those of the others."""
    engine = os.getpriority(os.PRIO_PROCESS, os.getpid())

    def priorities() -> set[int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(engine + 5, 19))
        with open_tier(valkey.url) as tier:
            assert all(put_all(tier, range(5)))
            writers = [t for t in threading.enumerate() if t.name.startswith("lmc-redis-write")]
            return {os.getpriority(os.PRIO_PROCESS, t.native_id or 0) for t in writers}

    with ThreadPoolExecutor(1) as other:
        assert other.submit(priorities).result() == {min(engine + 10, 19)}


@pytest.mark.parametrize("forger", [None, b"another secret of 16"])
def test_values_of_writers_without_the_secret_miss(valkey: Server, forger: bytes | None) -> None:
    """Their names and headers are right. Writers with the secret replace them."""
    with open_tier(valkey.url, hash_key=forger) as stranger:
        assert put_all(stranger, range(3)) == [True] * 3
    with open_tier(valkey.url, hash_key=b"the secret of us all") as tier:
        assert get_all(tier, range(3))[0] == [False] * 3
        wait_until(lambda: all(put_all(tier, range(3))), "a forged value stays")
        wait_until(
            lambda: get_all(tier, range(3)) == ([True] * 3, [chunk_data(i) for i in range(3)]),
            "it was not replaced",
        )


def test_bursts_of_writes_are_timed_once(valkey: Server) -> None:
    with open_tier(valkey.url) as tier:
        assert all(put_all(tier, range(5)))
        bursts: list[tuple[int, float]] = []

        def num_bytes_timed() -> int:
            bursts.extend(tier.take_write_times())  # timed after its last chunk's end
            return sum(num_bytes for num_bytes, _ in bursts)

        expected = 5 * GEOMETRY.chunk_bytes
        wait_until(lambda: num_bytes_timed() == expected, "the bursts were not timed")
        assert all(seconds > 0 for _, seconds in bursts)
        assert all(put_all(tier, range(5)))  # all exist
        assert tier.take_write_times() == []


# -- the tier's contract, for each server and each form of values ----------------------------------


_UNUSED = count(100, 100)
"""Chunk numbers that no example has used."""


@pytest.fixture(scope="module")
def oldest_redis(oldest_redis_path: str) -> Iterator[Server]:
    with running_server(oldest_redis_path) as server, server.client() as client:
        assert str(client.info("server")["redis_version"]).startswith("6.2.")
        yield server


@pytest.fixture(params=["valkey", "valkey, keyed", "valkey, compressed", "oldest_redis"])
def tier(request: pytest.FixtureRequest) -> Iterator[RedisTier]:
    name, _, kind = request.param.partition(", ")
    hash_key = b"0123456789abcdef" if kind == "keyed" else None
    codec = "blosc2" if kind == "compressed" else "none"
    server: Server = request.getfixturevalue(name)
    tier = RedisTier(config(server.url, hash_key=hash_key, codec=codec), PARTS)
    yield tier
    assert tier.close(1.0)


def put(tier: RedisTier, indices: Sequence[int]) -> list[bool]:
    ends = Ends()
    for order, index in enumerate(indices):
        assert tier.put(chunk_key(index), memoryview(kv_data(index)), ends, order)
    return ends.wait(len(indices))


def get(tier: RedisTier, indices: Sequence[int], seconds: float = 5.0) -> list[bytes | None]:
    """The bytes of each hit, ``None`` for a miss."""
    buffers = [bytearray(tier.geometries.largest.chunk_bytes) for _ in indices]
    keys = [chunk_key(i) for i in indices]
    deadline = time.monotonic() + seconds
    hits = tier.read(keys, [memoryview(b) for b in buffers], deadline).hits
    assert len(hits) == len(indices)
    return [bytes(b) if hit else None for hit, b in zip(hits, buffers, strict=True)]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(stored=st.sets(st.integers(0, 15)), asked=st.lists(st.integers(0, 15), max_size=12))
def test_leading_hits_have_the_bytes_that_were_put(
    tier: RedisTier, stored: set[int], asked: list[int]
) -> None:
    first = next(_UNUSED)
    put(tier, [first + i for i in sorted(stored)])
    found = get(tier, [first + i for i in asked])
    end = next((n for n, i in enumerate(asked) if i not in stored), len(asked))
    assert found[:end] == [kv_data(first + i) for i in asked[:end]]
    for i, data in zip(asked[end:], found[end:], strict=True):
        assert data is None or data == kv_data(first + i)
    assert end == len(asked) or found[end] is None


@pytest.mark.parametrize("missing", [0, 3, 6])
def test_chunks_that_are_reported_as_arrived_are_whole(
    tier: RedisTier, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """Later chunks wait until somebody has heard of the first, or the read could end before."""
    monkeypatch.setattr(pending_read, "_ARRIVAL_BYTES", 1)
    first, told, is_told, settle = next(_UNUSED), list[int](), threading.Event(), PendingRead.settle

    def settle_and_wait(read: PendingRead, request: ValueRequest) -> None:
        settle(read, request)
        assert not (missing and request.chunk) or is_told.wait(60.0)

    monkeypatch.setattr(PendingRead, "settle", settle_and_wait)
    put(tier, [first + i for i in range(6) if i != missing])
    buffers = [bytearray(GEOMETRY.chunk_bytes) for _ in range(6)]
    keys, views = [chunk_key(first + i) for i in range(6)], [memoryview(b) for b in buffers]

    def on_arrival(count: int) -> None:
        assert buffers[:count] == [kv_data(first + i) for i in range(count)]
        told.append(count)
        is_told.set()

    hits = tier.read(keys, views, time.monotonic() + 60.0, on_arrival=on_arrival).hits
    assert told == sorted(set(told))
    assert bool(told) is (missing > 0)
    assert all(0 < count <= missing and all(hits[:count]) for count in told)


def test_an_existing_value_stays(tier: RedisTier) -> None:
    put(tier, [0])
    ends = Ends()
    tier.put(chunk_key(0), memoryview(kv_data(1)), ends)
    ends.wait(1)
    assert get(tier, [0]) == [kv_data(0)]


def test_a_read_past_its_deadline_misses(tier: RedisTier) -> None:
    put(tier, [0])
    assert get(tier, [0], seconds=-1.0) == [None]


def test_misuse_raises(tier: RedisTier) -> None:
    with pytest.raises(ValueError, match="keys"):
        tier.read([chunk_key(0)], [], time.monotonic() + 1.0)


def test_a_closed_tier_misses_and_ends_every_put(tier: RedisTier) -> None:
    put(tier, [0])
    assert tier.close(1.0)
    assert get(tier, [0]) == [None]
    ends = Ends()
    assert not tier.put(chunk_key(1), memoryview(kv_data(1)), ends)
    assert ends.results == [False]
