"""A server that is well again is used again, also by a tier that is never idle."""

from __future__ import annotations

import time

from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_names import chunk_tag
from tests.support.redis.chunks import chunk_key, get_all, open_tier, put_all
from tests.support.redis.server_groups import running_cluster, wait_until
from tests.support.redis.servers import running_server


def test_reads_without_a_pause_do_not_keep_a_circuit_open(valkey_path: str) -> None:
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
        assert tier._servers.breaker(node).failed(at_once=True)  # the writer's connection lives
        until = time.monotonic() + 5.0
        while tier._servers.breaker(node).state is CircuitState.OPEN and time.monotonic() < until:
            assert get_all(tier, [first, other])[0][0]
            time.sleep(0.02)
        assert all(get_all(tier, [first, other])[0])


def test_a_server_without_room_for_one_more_connection_serves_those_it_has(
    valkey_path: str,
) -> None:
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


def test_there_is_no_room_at_a_server_that_is_away_or_takes_no_writes(valkey_path: str) -> None:
    """What would fail is not offered: it would be given up for good after some tries."""

    def has_room() -> bool:
        return tier.has_room(chunk_key(0), 1 << 30)

    with running_server(valkey_path) as server, open_tier(server.url) as tier:
        assert put_all(tier, [0]) == [True]
        wait_until(has_room, "there is room")
        server.kill()
        assert put_all(tier, [0]) == [False]
        wait_until(lambda: not has_room(), "it is away")
        server.start()
        wait_until(has_room, "it is back")
        with server.client() as client:
            client.config_set("maxmemory", 1, "maxmemory-policy", "noeviction")
            assert put_all(tier, [0]) == [False]
            wait_until(lambda: not has_room(), "it is full")
            client.config_set("maxmemory", 0)
        wait_until(has_room, "it has room again")
