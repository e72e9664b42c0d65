"""Lifetime and memory: TTL, eviction policies, a full server, a full queue, duplicate writers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import pytest

from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.counters import WriteEnd
from lmcache_connector.storage.redis.tier import RedisTier
from tests.support.clock import Clock, wait_until
from tests.support.redis.chunks import (
    GEOMETRY,
    chunk_data,
    chunk_key,
    closing_in_time,
    config,
    get_all,
    open_tier,
    put_all,
)
from tests.support.redis.servers import Server, running_server

# A few MiB: an empty server takes one or two.
MAX_MEMORY = 5 << 20


@pytest.fixture(
    scope="module",
    params=["valkey", "oldest_redis", pytest.param("redis", marks=pytest.mark.redis_server)],
)
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running_server(request.getfixturevalue(f"{request.param}_path")) as server:
        yield server


@pytest.fixture
def server(own_server: Server) -> Server:
    """An empty server whose memory settings the test may change."""
    configure(own_server, maxmemory=0, policy="noeviction")
    return own_server


def configure(server: Server, maxmemory: int, policy: str) -> None:
    with server.client() as client:
        client.flushall()
        client.config_resetstat()
        client.config_set("maxmemory", maxmemory)  # both in one call only since Redis 7
        client.config_set("maxmemory-policy", policy)


def remaining_ms(server: Server) -> list[int]:
    with server.client() as client:
        return [client.pttl(key) for key in client.keys("lmc:*-*")]


def test_values_have_the_configured_ttl(valkey: Server) -> None:
    with open_tier(valkey.url) as tier:
        put_all(tier, [0])
        assert set(remaining_ms(valkey)) == {-1}
    with valkey.client() as client:
        client.flushall()
    with open_tier(valkey.url, ttl_seconds=100.0) as tier:
        put_all(tier, [0])
        assert all(90_000 < left <= 100_000 for left in remaining_ms(valkey))


def test_a_hit_renews_the_ttl_if_configured(valkey: Server) -> None:
    for refresh in (False, True):
        with open_tier(valkey.url, ttl_seconds=100.0, refresh_ttl=refresh) as tier:
            put_all(tier, [0])
            with valkey.client() as client:
                for key in client.keys("lmc:*-*"):
                    client.pexpire(key, 50_000)
            assert get_all(tier, [0]) == ([True], [chunk_data(0)])
            assert all((left > 90_000) == refresh for left in remaining_ms(valkey))


def test_a_full_server_pauses_writes_and_serves_reads(server: Server) -> None:
    configure(server, MAX_MEMORY, "noeviction")
    count = 2 * MAX_MEMORY // GEOMETRY.chunk_bytes
    with open_tier(server.url, backoff_min_seconds=600.0, backoff_max_seconds=600.0) as tier:
        assert all(put_all(tier, range(10)))
        assert not all(put_all(tier, range(10, count)))
        assert tier.stats().writes_paused
        dropped = tier.stats().counts.writes[WriteEnd.QUEUE_FULL]
        assert put_all(tier, [0]) == [False], "not even asked while writes pause"
        assert tier.stats().counts.writes[WriteEnd.QUEUE_FULL] == dropped + 1
        assert all(state is CircuitState.CLOSED for _, state in tier.stats().servers)
        assert get_all(tier, range(10)) == ([True] * 10, [chunk_data(i) for i in range(10)])


def is_there(tier: RedisTier, index: int) -> bool:
    return put_all(tier, [index]) == [True]


def test_a_chunk_found_in_redis_does_not_end_a_pause_of_writes(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with open_tier(server.url, backoff_max_seconds=0.1) as tier:
        assert all(put_all(tier, range(4)))
        with server.client() as client:
            client.config_set("maxmemory", 1)
        for index in range(4):
            assert put_all(tier, [10 + index]) == [False]
            wait_until(partial(is_there, tier, index), "the server was never asked")
            assert tier.stats().writes_paused
        with server.client() as client:
            client.config_set("maxmemory", 0)
        wait_until(partial(is_there, tier, 10), "writes do not resume")
        assert not tier.stats().writes_paused
    assert sum("writing is paused" in record.message for record in caplog.records) == 1


def test_a_chunk_found_in_redis_delays_no_write_after_a_pause(server: Server) -> None:
    clock, geometries = Clock(), PartGeometries((GEOMETRY,))
    pauses = {"backoff_min_seconds": 60.0, "backoff_max_seconds": 60.0}
    with closing_in_time(RedisTier(config(server.url, **pauses), geometries, clock=clock)) as tier:
        assert all(put_all(tier, [0]))
        with server.client() as client:
            client.config_set("maxmemory", 1)
            assert put_all(tier, [10]) == [False]
            client.config_set("maxmemory", 0)
        assert not has_room(tier)
        clock.now += 60.0
        assert is_there(tier, 0)
        wait_until(partial(has_room, tier), "the next write waits for another back-off")
        assert put_all(tier, [11]) == [True]
        assert not tier.stats().writes_paused


def has_room(tier: RedisTier) -> bool:
    return tier.has_room(chunk_key(11), 1 << 30)


def test_a_demoted_master_pauses_writes_and_serves_reads(server: Server) -> None:
    with open_tier(server.url, backoff_min_seconds=600.0, backoff_max_seconds=600.0) as tier:
        assert all(put_all(tier, range(10)))
        with server.client() as client:
            client.replicaof("127.0.0.1", 1)  # where no server is: the data stays
            try:
                assert not any(put_all(tier, [i])[0] for i in range(10, 20))
                assert tier.stats().writes_paused
                assert get_all(tier, range(10)) == ([True] * 10, [chunk_data(i) for i in range(10)])
            finally:
                client.replicaof("NO", "ONE")


def test_a_server_without_a_memory_limit_is_warned_of_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(maxmemory: int, policy: str, ttl_seconds: float | None = None) -> int:
        configure(server, maxmemory, policy)
        caplog.clear()
        with open_tier(server.url, ttl_seconds=ttl_seconds) as tier:
            put_all(tier, [0])
        return sum("no maxmemory" in r.message for r in caplog.records)

    with caplog.at_level(logging.WARNING):
        assert warnings(0, "noeviction") == 1
        assert warnings(0, "noeviction", 60.0) == 0
        assert warnings(100 << 20, "noeviction") == 0
        assert warnings(0, "allkeys-lru") == 1
        assert warnings(100 << 20, "allkeys-lru") == 0
