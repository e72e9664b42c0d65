"""How much one burst of writes takes on, for how long, and what one slow node costs."""

from __future__ import annotations

from collections import Counter

from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.write_queue import MAX_LANES, NO_LANE
from lmcache_connector.storage.redis.writer import Lanes, burst_seconds, take_bytes
from tests.support.redis.chunks import Ends, chunk_data, chunk_key, get_all, open_tier, put_all
from tests.support.redis.server_groups import wait_until
from tests.support.redis.servers import Server
from tests.support.redis.slow_proxy import SlowLink, SlowProxy

MIB = 1 << 20
LARGE = ChunkGeometry(256, 0, (4096,), (0,), 1, "uint8")  # 1 MiB


def test_a_burst_is_short_however_fast_the_server() -> None:
    assert take_bytes(1e12) == 256 * MIB
    assert take_bytes(2e9) == 100_000_000
    assert take_bytes(100e6) == 32 * MIB
    assert take_bytes(10e6) == 5_000_000
    assert take_bytes(0.0) == 0, "one chunk"


def test_each_node_has_a_lane_of_its_own_as_long_as_there_are_enough() -> None:
    lanes, nodes = Lanes(), [Node(f"node:{i}") for i in range(100)]
    assert lanes.of(nodes[0]) == lanes.of(None) == NO_LANE
    assert len(lanes.assign(nodes[:3])) == 3
    before = [lanes.of(node) for node in nodes[:3]]
    assert len(lanes.assign(nodes[:MAX_LANES])) == MAX_LANES
    assert [lanes.of(node) for node in nodes[:3]] == before, "nothing moves"
    used = Counter(map(lanes.of, nodes)) if lanes.assign(nodes) else Counter()
    assert set(used) == set(range(1, MAX_LANES + 1))
    assert max(used.values()) == 4
    assert len(lanes.assign(nodes[50:53])) <= 3
    assert lanes.of(nodes[0]) == NO_LANE


def test_a_burst_has_a_deadline() -> None:
    assert burst_seconds(32 * MIB, write_timeout_seconds=5.0) == 42.0


def test_a_server_that_takes_writes_too_slowly_gets_none_for_a_while(valkey: Server) -> None:
    """It moves some bytes all the time, so no time-out ends a write. Its reads go on."""
    link = SlowLink()
    proxy = SlowProxy(valkey.port, link, is_narrow=True)
    try:
        with open_tier(
            proxy.url, LARGE, max_value_bytes=2 * MIB, num_connections=1, claim_seconds=0.01,
            write_timeout_seconds=0.6, backoff_min_seconds=3600.0, backoff_max_seconds=3600.0,
        ) as tier:  # fmt: skip
            wait_until(lambda: put_all(tier, [0]) == [True], "not writable at first")
            link.set(bytes_per_second=0.25 * MIB)  # 4 s a chunk; a burst of one has 2.2 s
            for index in range(1, 9):
                assert put_all(tier, [index]) == [False]
            assert tier.stats().writes_paused
            assert tier.stats().servers[0][1] is CircuitState.CLOSED
            assert not tier.put(chunk_key(9), memoryview(chunk_data(9, LARGE)), Ends())
            link.set()
            wait_until(lambda: get_all(tier, [0])[0] == [True], "reads went with the writes")
            assert get_all(tier, [0])[1] == [chunk_data(0, LARGE)]
    finally:
        proxy.close()
