"""A server that is well again is used again, also by a tier that is never idle."""

from __future__ import annotations

import time

from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_names import chunk_tag
from tests.support.redis.chunks import chunk_key, get_all, open_tier, put_all
from tests.support.redis.server_groups import running_cluster


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
