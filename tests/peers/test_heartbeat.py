"""An instance serves on without its router. tests/examples/test_proxy.py has both of them talk."""

from __future__ import annotations

from lmcache_connector.peers.heartbeat import Heartbeat, Registration
from tests.support.redis.servers import free_port


def test_a_heartbeat_survives_a_router_that_is_not_there() -> None:
    mine = Registration("kv_consumer", "127.0.0.1:8200", "127.0.0.1:14589", "e")
    Heartbeat(mine, f"http://127.0.0.1:{free_port()}", 0.01, b"").close()
