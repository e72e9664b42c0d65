"""The Redis tier behind a proxy that injects faults: no wrong bytes, no late return, no leak.

Time limits are wide, for a busy machine: they catch waits without a bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from lmcache_connector.storage.chunk_codec import HEADER_BYTES
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.client.dial import Client, take_socket
from lmcache_connector.storage.redis.connections import Servers
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.storage.redis.topology import Node, make_topology
from lmcache_connector.storage.redis.value_names import chunk_tag
from tests.support.clock import wait_until, within
from tests.support.redis.chunks import (
    GEOMETRY,
    PARTS,
    Ends,
    chunk_data,
    chunk_key,
    config,
    get_all,
    open_tier,
    put_all,
)
from tests.support.redis.proxies import Direction, Fault, FaultProxy, Kind
from tests.support.redis.server_groups import running_cluster
from tests.support.redis.servers import Server, running_server
from tests.support.redis.slow_proxy import SlowLink, SlowProxy

DEADLINE_SECONDS = 0.5
GRACE_SECONDS = 5.0
TIMEOUTS: dict[str, Any] = {"read_timeout_seconds": 0.3, "write_timeout_seconds": 0.3}
# Payloads of GEOMETRY at 4 KiB a value: 3 layers, then 1.
LINE_BYTES = len(b"$3200\r\n")
FIRST_PAYLOAD = 3 * 16 * 64
# The fault's offset: each lies in another part of the reply.
OFFSETS = {
    "first byte": 0,
    "in the line": 3,
    "line end": LINE_BYTES - 1,
    "header start": LINE_BYTES,
    "in the key": LINE_BYTES + 50,
    "in the seal": LINE_BYTES + 100,
    "payload start": LINE_BYTES + HEADER_BYTES,
    "mid-payload": LINE_BYTES + HEADER_BYTES + FIRST_PAYLOAD // 2,
    "payload end": LINE_BYTES + HEADER_BYTES + FIRST_PAYLOAD - 1,
    "carriage return": LINE_BYTES + HEADER_BYTES + FIRST_PAYLOAD,
    "line feed": LINE_BYTES + HEADER_BYTES + FIRST_PAYLOAD + 1,
    "next reply": LINE_BYTES + HEADER_BYTES + FIRST_PAYLOAD + 2,
}


@pytest.fixture
def proxy(valkey: Server) -> Iterator[FaultProxy]:
    with FaultProxy(valkey.port) as proxy:
        yield proxy


def test_a_connection_lost_after_its_checks_is_not_made_again_without_them(valkey: Server) -> None:
    """redis-py would dial again, and might reach another server."""

    def lose(client: Client) -> None:
        with valkey.client() as other:
            other.client_kill_filter(_id=client.client_id())

    settings = config(valkey.url)
    servers = Servers(settings, make_topology(settings, time.monotonic), time.monotonic, greet=lose)
    (node,) = servers.topology.nodes()
    with (
        servers.connect(node) as client,
        pytest.raises(redis.ConnectionError, match="the connection was lost"),
    ):
        take_socket(client)


@contextmanager
def readable_tier(proxy: FaultProxy, num_chunks: int, **settings: Any) -> Iterator[RedisTier]:
    """One connection through the proxy; the chunks from 0 on have been written and read."""
    patient = {"num_connections": 1, "read_timeout_seconds": 3600.0}
    with open_tier(proxy.url, **patient | settings) as tier:
        wait_until(lambda: all(put_all(tier, range(num_chunks))), "not writable at first")
        wait_until(lambda: all(checked_get(tier, range(num_chunks))), "not readable at first")
        yield tier


def checked_get(tier: RedisTier, indices: range | list[int]) -> list[bool]:
    """Hits, each compared byte for byte. The read must return in time."""
    begun = time.monotonic()
    hits, data = get_all(tier, indices, seconds=DEADLINE_SECONDS)
    assert time.monotonic() - begun < DEADLINE_SECONDS + GRACE_SECONDS
    for i, hit, found in zip(indices, hits, data, strict=True):
        assert not hit or found == chunk_data(i)
    return hits


@pytest.mark.parametrize("offset", OFFSETS.values(), ids=OFFSETS.keys())
@pytest.mark.parametrize("kind", Kind)
def test_no_fault_in_a_reply_reaches_the_buffer_of_a_hit(
    proxy: FaultProxy, kind: Kind, offset: int
) -> None:
    with readable_tier(proxy, 4, **TIMEOUTS) as tier:
        missed = sum(tier.stats().counts.misses.values())  # before the tier was connected
        proxy.arm(Fault(kind, offset))
        hits = checked_get(tier, range(4))
        assert proxy.num_struck == 1
        assert all(hits) == (kind is Kind.DELAY)
        assert sum(tier.stats().counts.misses.values()) == missed + 4 - sum(hits)
        wait_until(lambda: all(checked_get(tier, range(4))), "the tier did not recover")


def test_a_chunk_is_lacking_only_if_the_server_says_so(proxy: FaultProxy) -> None:
    with readable_tier(proxy, 2, **TIMEOUTS) as tier:

        def lacks(last: int) -> bool:
            keys = [chunk_key(0), chunk_key(last)]
            views = [memoryview(bytearray(GEOMETRY.chunk_bytes)) for _ in keys]
            result = tier.read(keys, views, time.monotonic() + DEADLINE_SECONDS)
            assert not all(result.hits)
            return result.lacks_next

        assert lacks(9)
        for kind in set(Kind) - {Kind.DELAY}:
            wait_until(lambda: all(checked_get(tier, range(2))), "the tier did not recover")
            proxy.arm(Fault(kind, OFFSETS["mid-payload"]))
            assert not lacks(1)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("kind", Kind)
def test_no_fault_in_a_write_leaves_a_wrong_chunk(
    proxy: FaultProxy, valkey: Server, kind: Kind, direction: Direction
) -> None:
    with open_tier(proxy.url, num_connections=1, **TIMEOUTS) as tier:
        wait_until(lambda: put_all(tier, [9]) == [True], "not writable at first")
        proxy.arm(Fault(kind, 5 if direction is Direction.REPLY else 3000, direction))
        written = put_all(tier, [0, 1])
        assert proxy.num_struck == 1
        with open_tier(valkey.url) as witness:
            for i, stored in enumerate(written):
                hits, data = get_all(witness, [i])
                assert not hits[0] or data[0] == chunk_data(i)
                # The server answers OK to a value with a flipped bit; only a read notices.
                assert hits[0] or not stored or kind is Kind.FLIP
        wait_until(lambda: all(put_all(tier, [0, 1])), "the tier did not recover")


@pytest.mark.parametrize("kind", Kind)
def test_a_fault_while_connecting_costs_one_connection(proxy: FaultProxy, kind: Kind) -> None:
    for offset in (0, 3, 20, 60, 200, 900):
        proxy.arm(Fault(kind, offset))
        with open_tier(proxy.url, num_connections=1, **TIMEOUTS) as tier:
            wait_until(lambda: all(put_all(tier, range(2))), "not writable")
            wait_until(lambda: all(checked_get(tier, range(2))), "not readable")
    assert proxy.num_struck


@pytest.mark.parametrize("greets", [False, True])
def test_one_time_out_of_a_server_opens_its_circuit(
    proxy: FaultProxy, valkey: Server, greets: bool
) -> None:
    with open_tier(valkey.url) as writer:
        assert all(put_all(writer, range(2)))
    with open_tier(proxy.url, num_connections=1, backoff_min_seconds=30.0,
                   backoff_max_seconds=30.0, read_timeout_seconds=0.3) as tier:  # fmt: skip
        wait_until(lambda: all(checked_get(tier, range(2))), "not readable at first")

        def is_struck() -> bool:
            """The fault may hit a connection that is being made."""
            proxy.arm(Fault(Kind.STALL, sticky=not greets))
            return checked_get(tier, range(2)) == [False, False]

        wait_until(is_struck, "no read was struck")
        wait_until(
            lambda: tier.stats().servers[0][1] is CircuitState.OPEN, "the circuit did not open"
        )
        # From now on a miss takes no time, whatever its deadline.
        buffer = memoryview(bytearray(GEOMETRY.chunk_bytes))
        assert tier.read([chunk_key(0)], [buffer], time.monotonic() + 3600.0).hits == [False]
        assert tier.stats().counts.misses["unavailable"] >= 1


def test_a_load_can_be_cancelled_while_the_server_is_silent(proxy: FaultProxy) -> None:
    with readable_tier(proxy, 1) as tier:
        proxy.arm(Fault(Kind.STALL, sticky=True))
        cancelled = threading.Event()
        buffer = memoryview(bytearray(GEOMETRY.chunk_bytes))
        threading.Timer(0.1, cancelled.set).start()
        far, before = time.monotonic() + 3600.0, tier.stats().counts.misses
        assert tier.read([chunk_key(0)], [buffer], far, cancelled.is_set).hits == [False]
        assert tier.stats().counts.misses - before == {"cancelled": 1}


def test_a_closed_tier_ends_its_reads(proxy: FaultProxy) -> None:
    """The one at a silent server, and the one that no reader has begun."""
    with readable_tier(proxy, 2) as tier:
        num_struck, before = proxy.num_struck, tier.stats().counts.misses
        proxy.arm(Fault(Kind.STALL))
        far = 60.0  # seconds
        reads = [threading.Thread(target=get_all, args=(tier, [i], far)) for i in range(2)]
        reads[0].start()
        wait_until(lambda: proxy.num_struck > num_struck, "the server was not asked")
        reads[1].start()
        wait_until(lambda: any(r.nodes_with_work() for r in tier._readers._reads), "not queued")
        assert tier.close(0.1)
        for read in reads:
            read.join(GRACE_SECONDS)
            assert not read.is_alive()
        assert tier.stats().counts.misses - before == {"cancelled": 2}


def test_a_short_error_is_known_at_once(proxy: FaultProxy) -> None:
    """Although it may be the beginning of another one, and nothing follows it."""
    with readable_tier(proxy, 1) as tier:
        before, replies = tier.stats().counts.misses, iter([b"-ERR x\r\n"])
        proxy.alter[Direction.REPLY] = lambda data: next(replies, b"")
        assert checked_get(tier, range(1)) == [False]
        assert tier.stats().counts.misses - before == {"error_reply": 1}


def test_a_read_that_expires_in_the_queue_is_no_failure(proxy: FaultProxy) -> None:
    """The reader still waits for an older read, which is cut off and counted."""
    with readable_tier(proxy, 2) as tier:
        num_struck, before = proxy.num_struck, tier.stats().counts.misses
        proxy.arm(Fault(Kind.STALL))
        cut_off: dict[int, bool] = {}

        def read(index: int, deadline: float) -> None:
            buffer = memoryview(bytearray(GEOMETRY.chunk_bytes))
            found = tier.read([chunk_key(index)], [buffer], deadline)
            assert found.hits == [False]
            cut_off[index] = found.cut_off

        soon = time.monotonic() + 2.0
        older = threading.Thread(target=read, args=(0, soon))
        older.start()
        wait_until(lambda: proxy.num_struck > num_struck, "the server was not asked")
        read(1, time.monotonic() + 0.05)
        older.join(GRACE_SECONDS)
        assert cut_off == {0: True, 1: False}
        assert tier.stats().counts.misses - before == {"deadline": 1, "queued": 1}


@pytest.mark.parametrize("kind", Kind)
def test_a_look_up_never_counts_missing_chunks(proxy: FaultProxy, kind: Kind) -> None:
    with open_tier(proxy.url) as tier:
        wait_until(lambda: all(put_all(tier, range(6))), "not writable at first")
    lookup = RedisLookup(config(proxy.url, **TIMEOUTS), [PARTS])
    keys = [chunk_key(i) for i in range(8)]

    def ask() -> int:
        return lookup.exists_prefix(keys, time.monotonic() + DEADLINE_SECONDS)

    wait_until(lambda: ask() == 6, "no answer at first")
    proxy.arm(Fault(kind, offset=5))
    assert ask() <= 6
    assert proxy.num_struck == 1
    wait_until(lambda: ask() == 6, "the lookup did not recover")
    lookup.close()


# -- a server that recovers ------------------------------------------------------------------------


def test_constant_reads_do_not_keep_a_circuit_open(valkey_path: str) -> None:
    with running_cluster(valkey_path) as cluster, open_tier(cluster.url) as tier:
        assert all(put_all(tier, range(40)))

        def node_of(index: int) -> Node:
            node = tier._servers.topology.node_of(chunk_tag("default", chunk_key(index)))
            assert node is not None
            return node

        first = 0
        other = next(i for i in range(40) if node_of(i) != node_of(first))
        assert all(get_all(tier, [first, other])[0])
        node = node_of(other)
        assert tier._servers.breaker(node).failed(at_once=True)  # the writer stays connected

        def has_recovered() -> bool:
            assert get_all(tier, [first, other])[0][0]
            return tier._servers.breaker(node).state is not CircuitState.OPEN

        assert within(5.0, has_recovered)
        assert all(get_all(tier, [first, other])[0])


def test_connections_stay_in_use_while_a_server_refuses_new_ones(valkey_path: str) -> None:
    with running_server(valkey_path) as server, open_tier(server.url, num_connections=1) as tier:
        assert put_all(tier, [0]) == [True]
        assert get_all(tier, [0])[0] == [True]
        with server.client() as client:
            writers = [c for c in client.client_list() if c["cmd"] in ("set", "strlen")]
            client.config_set("maxclients", len(client.client_list()) - 1)
            client.client_kill_filter(_id=writers[0]["id"])
            for i in range(1, 9):
                assert put_all(tier, [i]) == [False], "the writer has no connection"
                assert get_all(tier, [0])[0] == [True], "the reader has one"
            client.config_set("maxclients", 100)
        wait_until(lambda: put_all(tier, [9]) == [True], "it did not connect again")


def test_has_room_is_false_while_a_server_is_away_or_full(valkey_path: str) -> None:
    """It spares writes that would fail: chunks whose write failed are offered less often."""

    def has_room() -> bool:
        return tier.has_room(chunk_key(0), 1 << 30)

    with running_server(valkey_path) as server, open_tier(server.url) as tier:
        assert put_all(tier, [0]) == [True]
        wait_until(has_room, "no room at first")
        server.kill()
        assert put_all(tier, [0]) == [False]
        wait_until(lambda: not has_room(), "there is room at a dead server")
        server.start()
        wait_until(has_room, "no room once the server is back")
        with server.client() as client:
            client.config_set("maxmemory", 1, "maxmemory-policy", "noeviction")
            assert put_all(tier, [0]) == [False]
            wait_until(lambda: not has_room(), "there is room at a full server")
            client.config_set("maxmemory", 0)
        wait_until(has_room, "no room once the limit is lifted")


# -- a server that is slow to take writes ----------------------------------------------------------


MIB = 1 << 20
LARGE = ChunkGeometry(256, 0, (4096,), (0,), 1, "uint8")  # 1 MiB


def test_writes_pause_at_a_server_that_takes_them_too_slowly(valkey: Server) -> None:
    """The server takes some bytes all the time, so no write times out. Its reads go on."""
    link = SlowLink()
    with (
        SlowProxy(valkey.port, link, is_narrow=True) as proxy,
        open_tier(
            proxy.url, LARGE, max_value_bytes=2 * MIB, num_connections=1,
            write_timeout_seconds=1.2, backoff_min_seconds=3600.0, backoff_max_seconds=3600.0,
        ) as tier,
    ):  # fmt: skip
        wait_until(lambda: put_all(tier, [0]) == [True], "not writable at first")
        # 5 s a chunk, of which a burst is given 3.4; 64 KiB in 0.3 s, else it is silent after 1.2.
        link.set(bytes_per_second=0.2 * MIB)
        assert put_all(tier, [1]) == [False]
        began = time.monotonic()
        assert not any(put_all(tier, range(2, 20)))
        assert time.monotonic() - began < 40.0, "every write has waited out its 3.4 s"
        assert tier.stats().writes_paused
        assert tier.stats().servers[0][1] is CircuitState.CLOSED
        assert not tier.put(chunk_key(20), memoryview(chunk_data(20, LARGE)), Ends())
        link.set()
        wait_until(lambda: get_all(tier, [0])[0] == [True], "reads have paused with the writes")
        assert get_all(tier, [0])[1] == [chunk_data(0, LARGE)]


def test_a_node_that_has_gone_pauses_nothing() -> None:
    nodes = [Node("full:1"), Node("other:2")]
    topology: Any = SimpleNamespace(nodes=lambda: nodes)
    servers = Servers(config("redis://h"), topology, time.monotonic)
    servers.pause(nodes[0]).failed(at_once=True)
    assert servers.any_paused()
    del nodes[0]
    assert not servers.any_paused()
