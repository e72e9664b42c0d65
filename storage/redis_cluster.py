"""Redis Cluster: which master holds which slot, as redis-py's node manager learns it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from redis import Connection, SSLConnection
from redis.cluster import ClusterNode, NodesManager
from redis.crc import key_slot

from .redis_config import RedisTierConfig
from .redis_topology import CONNECT_ERRORS, Node, connection_options

# Between two looks at the slot map, however many errors ask for one.
_REFRESH_SECONDS = 0.25


class ClusterTopology:
    """The masters of a cluster. The slot map is read at the first `prepare`, and again after
    `mark_stale`: a redirection, a broken connection or a refused one."""

    def __init__(self, config: RedisTierConfig, clock: Callable[[], float]) -> None:
        address = config.address
        self._options = connection_options(config)
        self._tls = address.tls
        self._hosts = address.hosts
        self._clock = clock
        self._manager: NodesManager | None = None
        self._owners: dict[int, Node] = {}
        self._stale = True
        self._next_refresh = clock()
        self._refreshing = threading.Lock()

    def prepare(self) -> None:
        # One thread at a time; the others go on with the map there is, if there is one.
        current = self._owners and not self._stale
        if current or not self._refreshing.acquire(blocking=not self._owners):
            return
        try:
            if self._stale and self._clock() >= self._next_refresh:
                self._next_refresh = self._clock() + _REFRESH_SECONDS
                self._refresh()
        finally:
            self._refreshing.release()

    def node_of(self, key: bytes) -> Node | None:
        return self._owners.get(key_slot(key))

    def nodes(self) -> tuple[Node, ...]:
        return tuple(dict.fromkeys(self._owners.values()))

    def connect(self, node: Node) -> Connection:
        host, _, port = node.rpartition(":")
        kind = SSLConnection if self._tls else Connection
        connection = kind(host=host, port=int(port), **self._options)
        connection.connect()
        return connection

    def mark_stale(self) -> None:
        self._stale = True

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()

    def _refresh(self) -> None:
        # Before the look, so that news that comes during it are not lost.
        self._stale = False
        try:
            if self._manager is None:
                self._manager = self._make_manager()
            else:
                self._manager.initialize()
        except CONNECT_ERRORS:
            self._stale = True
            raise
        self._owners = {
            slot: Node(f"{nodes[0].host}:{nodes[0].port}")
            for slot, nodes in self._manager.slots_cache.items()
        }

    def _make_manager(self) -> NodesManager:
        options: dict[str, Any] = {k: v for k, v in self._options.items() if k != "db"}
        return NodesManager(
            [ClusterNode(host, port) for host, port in self._hosts],
            # A cluster that has lost a master still has two thirds of the chunks.
            require_full_coverage=False,
            ssl=self._tls,
            **options,
        )
