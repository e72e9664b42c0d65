"""The Redis tier against a real server: what goes in comes out, or is a miss."""

from __future__ import annotations

import pytest

from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.storage.redis import tier as tier_module
from lmcache_connector.storage.redis.counters import WriteEnd
from lmcache_connector.storage.redis.topology import Node, Topology
from lmcache_connector.storage.redis.value_names import chunk_tag
from tests.support.redis.chunks import (
    GEOMETRY,
    chunk_data,
    chunk_key,
    get_all,
    open_tier,
    put_all,
)
from tests.support.redis.server_groups import wait_until
from tests.support.redis.servers import Server


@pytest.fixture(params=["tcp", "unix"])
def url(request: pytest.FixtureRequest, valkey: Server) -> str:
    return valkey.url if request.param == "tcp" else valkey.unix_url


def test_big_values_come_back(valkey: Server) -> None:
    # The chunk of an 8B model: 8 heads of 4 MiB, so that one head takes two values.
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


def test_a_chunk_with_one_value_gone_is_a_miss(valkey: Server) -> None:
    with open_tier(valkey.url) as tier, valkey.client() as client:
        put_all(tier, range(3))
        victim = client.keys(f"lmc:{{default:{chunk_key(1).hex()}}}*-*")[0]
        client.delete(victim)
        assert get_all(tier, range(3))[0][:2] == [True, False]


def test_each_value_is_written_once(valkey: Server) -> None:
    with open_tier(valkey.url) as one, open_tier(valkey.url) as other:
        assert put_all(one, range(5)) == [True] * 5
        assert put_all(other, range(5)) == [True] * 5
        assert other.stats().counts.writes[WriteEnd.ALREADY_THERE] == 5
        assert other.stats().counts.bytes_written == 0


@pytest.mark.parametrize("forger", [None, b"another secret of 16"])
def test_who_does_not_know_the_secret_forges_no_value(valkey: Server, forger: bytes | None) -> None:
    """Whatever he writes under the right names, with the right header: it is a miss, and others
    write over it."""
    with open_tier(valkey.url, hash_key=forger) as stranger:
        assert put_all(stranger, range(3)) == [True] * 3
    with open_tier(valkey.url, hash_key=b"the secret of us all") as tier:
        assert get_all(tier, range(3))[0] == [False] * 3
        wait_until(lambda: all(put_all(tier, range(3))), "a forged value stays")
        wait_until(
            lambda: get_all(tier, range(3)) == ([True] * 3, [chunk_data(i) for i in range(3)]),
            "it was not replaced",
        )


def test_a_chunk_on_an_unknown_node_ends_the_read(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PartlyKnown(Topology):
        def node_of(self, key: bytes) -> Node | None:
            return None if key == chunk_tag("default", chunk_key(2)) else super().node_of(key)

    with open_tier(valkey.url) as tier:
        put_all(tier, range(4))
    monkeypatch.setattr(tier_module, "make_topology", PartlyKnown)
    with open_tier(valkey.url) as tier:
        hits, data = get_all(tier, range(4))
        assert hits == [True, True, False, False]
        assert data[:2] == [chunk_data(0), chunk_data(1)]
        assert tier.stats().counts.misses == {"unavailable": 2}


def test_bursts_of_writes_are_timed_once(valkey: Server) -> None:
    with open_tier(valkey.url) as tier:
        assert all(put_all(tier, range(5)))
        bursts: list[tuple[int, float]] = []

        def num_bytes_timed() -> int:
            bursts.extend(tier.take_write_times())  # a burst is timed after its last chunk's end
            return sum(num_bytes for num_bytes, _ in bursts)

        expected = 5 * GEOMETRY.chunk_bytes
        wait_until(lambda: num_bytes_timed() == expected, "the bursts were not timed")
        assert all(seconds > 0 for _, seconds in bursts)
        assert all(put_all(tier, range(5)))  # they are there already
        assert tier.take_write_times() == []
