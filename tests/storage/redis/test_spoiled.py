"""Damaged and foreign values are found and written again, and cost no other chunk a hit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, product

import pytest

from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    Codec,
    Sealer,
    decode_header,
    encode_header,
)
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.counters import WriteEnd
from lmcache_connector.storage.redis.tier import RedisTier
from tests.support.clock import wait_until
from tests.support.redis.chunks import chunk_data, chunk_key, get_all, kv_data, open_tier, put_all
from tests.support.redis.servers import CACHE, Server

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
    """The name of the chunk's second value."""
    with server.client() as client:
        return bytes(sorted(client.keys(f"lmc:*{chunk_key(index).hex()}*-*"))[1])


def assert_nobody_is_blamed(tier: RedisTier) -> None:
    assert all(state is CircuitState.CLOSED for _, state in tier.stats().servers)
    assert not tier.stats().writes_paused


@pytest.mark.parametrize("spoil", WAYS)
def test_a_reader_rewrites_a_spoiled_value(valkey: Server, spoil: Spoil) -> None:
    with open_tier(valkey.url) as tier:
        assert all(put_all(tier, range(3)))
        spoil(valkey, a_name(valkey, 1))
        for _ in range(4):  # more often than opens a circuit
            hits, data = get_all(tier, range(3))
            assert (hits[:2], data[0]) == ([True, False], chunk_data(0))
        assert put_all(tier, range(3)) == [True] * 3
        assert_nobody_is_blamed(tier)
        assert tier.stats().counts.writes[WriteEnd.WRITTEN] == 3 + 1
        assert get_all(tier, range(3)) == ([True] * 3, [chunk_data(i) for i in range(3)])


def test_a_rewrite_that_fails_is_made_up_for(valkey: Server) -> None:
    with open_tier(valkey.url) as tier, valkey.client() as client:
        assert put_all(tier, [1]) == [True]
        a_flipped_bit(valkey, a_name(valkey, 1))
        assert get_all(tier, [1])[0] == [False]
        client.config_set("maxmemory", 1, "maxmemory-policy", "noeviction")
        try:
            assert put_all(tier, [1]) == [False]
        finally:  # other tests share the server
            client.config_set(*chain(*CACHE.items()))
        wait_until(lambda: put_all(tier, [1]) == [True], "writes went on pausing")
        assert get_all(tier, [1]) == ([True], [chunk_data(1)])
        assert put_all(tier, [1]) == [True]
        writes = tier.stats().counts.writes
        assert (writes[WriteEnd.WRITTEN], writes[WriteEnd.ALREADY_THERE]) == (2, 1)


def test_many_damaged_values_log_one_line(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    num_chunks = 12
    with open_tier(valkey.url) as tier:
        assert all(put_all(tier, range(num_chunks)))
        for index in range(num_chunks):  # one read each, as requests do
            a_flipped_bit(valkey, a_name(valkey, index))
            assert get_all(tier, [index])[0] == [False]
    assert len([r for r in caplog.records if "failed verification" in r.message]) == 1


@pytest.mark.parametrize("spoil", [another_type, another_length, empty])
def test_a_writer_replaces_impossible_values(valkey: Server, spoil: Spoil) -> None:
    with open_tier(valkey.url) as writer:
        assert all(put_all(writer, range(3)))
        spoil(valkey, a_name(valkey, 1))
        assert put_all(writer, range(3)) == [True] * 3, "in one burst with its neighbours"
        assert_nobody_is_blamed(writer)
        assert get_all(writer, range(3)) == ([True] * 3, [chunk_data(i) for i in range(3)])


def test_vanished_values_blame_no_server(valkey: Server) -> None:
    """A value may vanish between its write and the check that replies are in step."""
    with open_tier(valkey.url, ttl_seconds=0.001) as tier:
        for _ in range(20):
            put_all(tier, range(3))
            assert_nobody_is_blamed(tier)


# -- compressed values -----------------------------------------------------------------------------


CODECS: list[Codec] = ["none", "blosc2"]


def assert_no_miss(tier: RedisTier) -> None:
    assert tier.stats().counts.misses == {}
    assert all(state is CircuitState.CLOSED for _, state in tier.stats().servers)


@pytest.mark.parametrize(("writes", "reads"), product(CODECS, CODECS))
@pytest.mark.parametrize("keyed", [False, True])
def test_every_reader_reads_every_value(
    valkey: Server, writes: Codec, reads: Codec, keyed: bool
) -> None:
    opened = partial(open_tier, valkey.url, hash_key=b"0123456789abcdef" if keyed else None)
    with opened(codec=writes) as writer:
        assert all(put_all(writer, range(3), kv_data))
    with opened(codec=reads) as reader:
        for _ in range(2):
            assert get_all(reader, range(3)) == ([True] * 3, [kv_data(i) for i in range(3)])
        assert_no_miss(reader)


def cut_and_sealed_again(value: bytes) -> bytes:
    stored = value[HEADER_BYTES : HEADER_BYTES + (len(value) - HEADER_BYTES) // 2]
    header = replace(decode_header(value[:HEADER_BYTES]), compressed_bytes=len(stored))
    return encode_header(header, stored, Sealer()) + stored


def test_a_chunk_that_does_not_decompress_is_a_miss(valkey: Server) -> None:
    """`test_compression` has all kinds of them."""
    with open_tier(valkey.url, codec="blosc2") as tier:
        assert all(put_all(tier, range(3), kv_data))
        with valkey.client() as client:
            name = min(client.keys(f"lmc:*{chunk_key(1).hex()}*-*"))
            client.set(name, cut_and_sealed_again(client.get(name)))
            hits, data = get_all(tier, range(3))
            assert (hits[:2], data[0]) == ([True, False], kv_data(0))
            assert tier.stats().counts.misses["bad_compression"] == 1
        assert all(state is CircuitState.CLOSED for _, state in tier.stats().servers)
        assert put_all(tier, range(3), kv_data) == [True] * 3
        assert get_all(tier, range(3)) == ([True] * 3, [kv_data(i) for i in range(3)])


def test_a_flipped_bit_is_seen_before_decompression(valkey: Server) -> None:
    with open_tier(valkey.url, codec="blosc2") as tier, valkey.client() as client:
        assert all(put_all(tier, range(2), kv_data))
        for index, at in enumerate((HEADER_BYTES, HEADER_BYTES + 500)):
            name = min(client.keys(f"lmc:*{chunk_key(index).hex()}*-*"))
            client.setrange(name, at, bytes([client.get(name)[at] ^ 1]))
            assert get_all(tier, [index])[0] == [False]
        assert tier.stats().counts.misses == {"bad_checksum": 2}
