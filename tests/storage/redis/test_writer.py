"""How much one burst of writes takes on, for how long, and what one slow node costs."""

from __future__ import annotations

import time

from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from tests.support.redis.chunks import Ends, chunk_data, chunk_key, get_all, open_tier, put_all
from tests.support.redis.server_groups import wait_until
from tests.support.redis.servers import Server
from tests.support.redis.slow_proxy import SlowLink, SlowProxy

MIB = 1 << 20
LARGE = ChunkGeometry(256, 0, (4096,), (0,), 1, "uint8")  # 1 MiB


def test_a_server_that_takes_writes_too_slowly_gets_none_for_a_while(valkey: Server) -> None:
    """It moves some bytes all the time, so no time-out ends a write. Its reads go on."""
    link = SlowLink()
    proxy = SlowProxy(valkey.port, link, is_narrow=True)
    try:
        with open_tier(
            proxy.url, LARGE, max_value_bytes=2 * MIB, num_connections=1,
            write_timeout_seconds=0.6, backoff_min_seconds=3600.0, backoff_max_seconds=3600.0,
        ) as tier:  # fmt: skip
            wait_until(lambda: put_all(tier, [0]) == [True], "not writable at first")
            link.set(bytes_per_second=0.25 * MIB)  # 4 s a chunk; a burst of one has 2.2 s
            assert put_all(tier, [1]) == [False]
            began = time.monotonic()
            assert not any(put_all(tier, range(2, 20)))
            assert time.monotonic() - began < 20.0, "each has had its 2.2 s"
            assert tier.stats().writes_paused
            assert tier.stats().servers[0][1] is CircuitState.CLOSED
            assert not tier.put(chunk_key(20), memoryview(chunk_data(20, LARGE)), Ends())
            link.set()
            wait_until(lambda: get_all(tier, [0])[0] == [True], "reads went with the writes")
            assert get_all(tier, [0])[1] == [chunk_data(0, LARGE)]
    finally:
        proxy.close()
