"""Names under which something else lies than the value: found, written anew, and no neighbour
suffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_connector.storage.chunk_codec import HEADER_BYTES
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.counters import WriteEnd
from lmcache_connector.storage.redis.tier import RedisTier
from tests.support.redis.chunks import (
    chunk_data,
    chunk_key,
    get_all,
    open_tier,
    put_all,
)
from tests.support.redis.servers import Server

# Chunk 1 of three is spoiled, by each of these means.
Spoil = Callable[[Server, bytes], None]


def another_type(server: Server, name: bytes) -> None:
    with server.client() as client:
        client.delete(name)
        client.rpush(name, b"x")


def another_length(server: Server, name: bytes) -> None:
    with server.client() as client:
        client.append(name, b"x")


def empty(server: Server, name: bytes) -> None:
    with server.client() as client:
        client.set(name, b"")


def a_flipped_bit(server: Server, name: bytes) -> None:
    with server.client() as client:
        client.setrange(name, HEADER_BYTES + 7, bytes([client.get(name)[HEADER_BYTES + 7] ^ 1]))


def another_chunks_value(server: Server, name: bytes) -> None:
    with server.client() as client:
        other = name.replace(chunk_key(1).hex().encode(), chunk_key(0).hex().encode())
        client.set(name, client.get(other))


WAYS: list[Spoil] = [another_type, another_length, empty, a_flipped_bit, another_chunks_value]


def a_name(server: Server, index: int) -> bytes:
    """Of the second of the chunk's values."""
    with server.client() as client:
        return bytes(sorted(client.keys(f"lmc:*{chunk_key(index).hex()}*-*"))[1])


def assert_nobody_is_blamed(tier: RedisTier) -> None:
    assert all(state is CircuitState.CLOSED for _, state in tier.stats().servers)
    assert not tier.stats().writes_paused


@pytest.mark.parametrize("spoil", WAYS)
def test_who_reads_a_spoiled_value_writes_it_anew(valkey: Server, spoil: Spoil) -> None:
    with open_tier(valkey.url) as tier:
        assert all(put_all(tier, range(3)))
        spoil(valkey, a_name(valkey, 1))
        for _ in range(4):  # more often than it takes to open a circuit
            hits, data = get_all(tier, range(3))
            assert (hits[:2], data[0]) == ([True, False], chunk_data(0))
        assert put_all(tier, range(3)) == [True] * 3
        assert_nobody_is_blamed(tier)
        assert tier.stats().counts.writes[WriteEnd.WRITTEN] == 3 + 1
        assert get_all(tier, range(3)) == ([True] * 3, [chunk_data(i) for i in range(3)])


def test_an_episode_of_damage_is_one_line(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    num_chunks = 12
    with open_tier(valkey.url) as tier:
        assert all(put_all(tier, range(num_chunks)))
        for index in range(num_chunks):  # one after the other, as requests find them
            a_flipped_bit(valkey, a_name(valkey, index))
            assert get_all(tier, [index])[0] == [False]
    assert len([r for r in caplog.records if "not what its name says" in r.message]) == 1


@pytest.mark.parametrize("spoil", [another_type, another_length, empty])
def test_a_writer_replaces_what_cannot_be_the_value(valkey: Server, spoil: Spoil) -> None:
    with open_tier(valkey.url) as writer:
        assert all(put_all(writer, range(3)))
        spoil(valkey, a_name(valkey, 1))
        assert put_all(writer, range(3)) == [True] * 3, "in one burst with its neighbours"
        assert_nobody_is_blamed(writer)
        assert get_all(writer, range(3)) == ([True] * 3, [chunk_data(i) for i in range(3)])


def test_the_last_value_of_a_batch_fails_alone(valkey: Server) -> None:
    """A value may vanish between its write and the check that answers are in step."""
    with open_tier(valkey.url, ttl_seconds=0.001) as tier:
        for _ in range(20):
            put_all(tier, range(3))
            assert_nobody_is_blamed(tier)
