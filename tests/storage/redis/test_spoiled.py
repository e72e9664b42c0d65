"""Names under which something else lies than the value: found, removed, written anew, and no
neighbour suffers."""

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
    count_found,
    get_all,
    open_tier,
    put_all,
)
from tests.support.redis.server_groups import wait_until
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
def test_one_who_only_reads_makes_room_for_one_who_writes(valkey: Server, spoil: Spoil) -> None:
    with open_tier(valkey.url, claim_seconds=0.001) as writer, open_tier(valkey.url) as reader:
        assert all(put_all(writer, range(3)))
        name = a_name(valkey, 1)
        spoil(valkey, name)
        for _ in range(4):  # more often than it takes to open a circuit
            hits, data = get_all(reader, range(3))
            assert (hits[:2], data[0]) == ([True, False], chunk_data(0))
        with valkey.client() as client:
            wait_until(lambda: not client.exists(name), "the value was not removed")
        assert count_found(valkey.url, 3) == 1, "look-ups know at once"
        assert_nobody_is_blamed(reader)
        # The writer has read nothing: it finds the value missing.
        assert put_all(writer, range(3)) == [True] * 3
        assert writer.stats().counts.writes[WriteEnd.WRITTEN] == 3 + 1
        assert get_all(reader, range(3)) == ([True] * 3, [chunk_data(i) for i in range(3)])


def test_an_episode_of_damage_is_one_line(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    num_chunks = 12
    with open_tier(valkey.url) as writer:
        assert all(put_all(writer, range(num_chunks)))
    names = [a_name(valkey, index) for index in range(num_chunks)]
    with open_tier(valkey.url) as reader, valkey.client() as client:
        for name in names:
            a_flipped_bit(valkey, name)
        for index in range(num_chunks):  # one after the other, as requests find them
            assert get_all(reader, [index])[0] == [False]
        wait_until(lambda: not client.exists(*names), "the values were not removed")
    lines = [r.message for r in caplog.records if "removed" in r.message]
    assert len(lines) == 1
    assert f"removed {num_chunks} values" in lines[0]


@pytest.mark.parametrize("spoil", [another_type, another_length, empty])
def test_a_writer_replaces_what_cannot_be_the_value(valkey: Server, spoil: Spoil) -> None:
    with open_tier(valkey.url, claim_seconds=0.001) as writer:
        assert all(put_all(writer, range(3)))
        spoil(valkey, a_name(valkey, 1))
        assert put_all(writer, range(3)) == [True] * 3, "in one burst with its neighbours"
        assert_nobody_is_blamed(writer)
        assert get_all(writer, range(3)) == ([True] * 3, [chunk_data(i) for i in range(3)])


@pytest.mark.parametrize("spoil", [a_flipped_bit, another_chunks_value])
def test_without_the_right_to_remove_one_who_reads_and_writes_heals(
    valkey: Server, spoil: Spoil
) -> None:
    with valkey.client() as client:
        client.execute_command("ACL SETUSER poor on >pass ~lmc:* -@all +get +set +strlen +exists")
    url = valkey.url.replace("//", "//poor:pass@")
    with open_tier(url, claim_seconds=0.001) as tier:
        assert all(put_all(tier, range(3)))
        spoil(valkey, a_name(valkey, 1))
        assert get_all(tier, range(3))[0][:2] == [True, False]
        assert put_all(tier, range(3)) == [True] * 3
        assert_nobody_is_blamed(tier)
        assert get_all(tier, range(3))[0] == [True] * 3


def test_a_good_value_written_meanwhile_stays(valkey: Server) -> None:
    """However often one reader finds it spoiled while others write it anew."""
    with open_tier(valkey.url, claim_seconds=0.001) as tier, open_tier(valkey.url) as reader:
        assert all(put_all(tier, [1]))
        name = a_name(valkey, 1)
        with valkey.client() as client:
            good = client.get(name)
            for _ in range(200):
                client.set(name, good[:-1] + bytes([good[-1] ^ 1]))
                get_all(reader, [1])
                client.set(name, good)
                assert client.get(name) == good
            # Whoever looks at it last finds it sound.
            assert get_all(reader, [1]) == ([True], [chunk_data(1)])
            wait_until(lambda: reader.flush(1.0), "the reader's tier is busy")
            assert client.get(name) == good


@pytest.mark.parametrize("lifetime", [None, 60_000])
def test_a_claim_that_does_not_end_is_taken_over(valkey: Server, lifetime: int | None) -> None:
    """Whatever left it: a writer that died, or somebody else's key without an end."""
    with open_tier(valkey.url, claim_seconds=0.2) as tier:
        assert put_all(tier, [0]) == [True]
        with valkey.client() as client:
            (claim,) = client.keys("lmc:*claim*")
            client.flushall()
            client.set(claim, b"1", px=lifetime)
            assert put_all(tier, [0]) == [False]
            assert tier.stats().counts.writes[WriteEnd.CLAIMED_ELSEWHERE] == 1
            wait_until(lambda: put_all(tier, [0]) == [True], "the claim was not taken over")
        assert get_all(tier, [0]) == ([True], [chunk_data(0)])


def test_who_finds_all_values_there_leaves_no_claim(valkey: Server) -> None:
    """What vanishes right after that is written by the next who has it, without a wait."""
    with open_tier(valkey.url) as one, open_tier(valkey.url) as other, valkey.client() as client:
        assert put_all(one, range(3)) == [True] * 3
        client.delete(*client.keys("lmc:*claim*"))
        assert put_all(one, range(5)) == [True] * 5, "three are there, two are not"
        assert one.stats().counts.writes == {WriteEnd.WRITTEN: 5, WriteEnd.ALREADY_THERE: 3}
        assert put_all(other, range(3)) == [True] * 3
        wait_until(lambda: len(client.keys("lmc:*claim*")) == 2, "needless claims have stayed")
        client.delete(*client.keys("lmc:*-*"))
        assert sorted(put_all(other, range(5))) == [False] * 2 + [True] * 3
        assert get_all(other, range(3)) == ([True] * 3, [chunk_data(i) for i in range(3)])
        assert other.stats().counts.writes[WriteEnd.CLAIMED_ELSEWHERE] == 2
        assert_nobody_is_blamed(other)


def test_the_last_value_of_a_batch_fails_alone(valkey: Server) -> None:
    """A value may vanish between its write and the check that answers are in step."""
    with open_tier(valkey.url, ttl_seconds=0.001, claim_seconds=0.001) as tier:
        for _ in range(20):
            put_all(tier, range(3))
            assert_nobody_is_blamed(tier)
