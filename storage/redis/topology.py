"""Which server holds a key, and how to connect to it: redis-py does this part.

A *node* is a server's name: ``host:port``, a socket path, or ``sentinel:`` and a master's name.
Topologies are thread-safe. `Topology.prepare` and `Topology.connect` do network I/O and belong in
background threads; `Topology.node_of` never does.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NewType, Protocol

from redis import Connection, SSLConnection, UnixDomainSocketConnection
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, NodesManager
from redis.crc import key_slot
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import RedisClusterException, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.url import TopologyKind

Node = NewType("Node", str)

# Between two looks at the slot map, however many errors ask for one.
_REFRESH_SECONDS = 0.25
# What redis-py raises on a reply that it cannot parse.
_PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError)
# What connecting raises. redis-py's own errors cover refusals and time-outs; the handshake may also
# meet a broken socket, an unknown host or a certificate it does not trust (all OSError).
CONNECT_ERRORS = (RedisError, RedisClusterException, OSError, *_PARSE_ERRORS)


class Topology(Protocol):
    def prepare(self) -> None:
        """Learn what `node_of` needs to know. Raises one of ``CONNECT_ERRORS``."""
        ...

    def node_of(self, key: bytes) -> Node | None:
        """The node that holds ``key``, None while that is not known."""
        ...

    def nodes(self) -> tuple[Node, ...]:
        """All nodes known now."""
        ...

    def connect(self, node: Node) -> Connection:
        """A connected, authenticated redis-py connection. Raises one of ``CONNECT_ERRORS``."""
        ...

    def mark_stale(self) -> None:
        """Look again at the next `prepare`: a server said, or its silence suggests, that something
        has changed."""
        ...

    def close(self) -> None:
        """Close the connections that `prepare` and `connect` keep for themselves."""
        ...


def connection_options(config: RedisTierConfig) -> dict[str, Any]:
    """Options of a redis-py connection to a data server.

    RESP2, because its replies have one shape; no client-side extras, which need permissions.
    """
    return {
        "protocol": 2,
        "driver_info": None,
        "socket_timeout": config.read_timeout_seconds,
        "socket_connect_timeout": config.connect_timeout_seconds,
        **config.address.connection_options(),
    }


def take_socket(connection: Connection) -> socket.socket:
    """Take the connected socket from redis-py. The caller closes it.

    Raises redis-py's ``ConnectionError`` if the connection is closed already.
    """
    sock: socket.socket | None = connection._sock
    if sock is None:
        raise LostError("the connection was lost")
    connection._sock = None
    return sock


class _OneNode:
    """A topology of one node that is known from the start. ``make()``: a connection to it, to be
    connected."""

    def __init__(self, node: str, make: Callable[[], Connection]) -> None:
        self._node = Node(node)
        self._make = make

    def prepare(self) -> None:
        return

    def node_of(self, key: bytes) -> Node | None:
        return self._node

    def nodes(self) -> tuple[Node, ...]:
        return (self._node,)

    def connect(self, node: Node) -> Connection:
        connection = self._make()
        connection.connect()
        return connection

    def mark_stale(self) -> None:
        return

    def close(self) -> None:
        return


class SingleTopology(_OneNode):
    """One server, reached by TCP, TLS or a Unix socket."""

    def __init__(self, config: RedisTierConfig) -> None:
        address = config.address
        options = connection_options(config)
        if address.path:
            make = partial(UnixDomainSocketConnection, path=address.path, **options)
            super().__init__(address.path, make)
        else:
            ((host, port),) = address.hosts
            kind = SSLConnection if address.tls else Connection
            super().__init__(f"{host}:{port}", partial(kind, host=host, port=port, **options))


class SentinelTopology(_OneNode):
    """The master that a group of sentinels names, asked again for every connection. A master
    demoted later still serves reads, which are verified; it refuses writes."""

    def __init__(self, config: RedisTierConfig) -> None:
        address = config.address
        options = connection_options(config)
        timeouts = {k: v for k, v in options.items() if k.startswith("socket_")}
        self._sentinel = Sentinel(
            address.hosts,
            sentinel_kwargs={
                **timeouts,
                "ssl": address.tls,
                **address.sentinel_options(),
                "driver_info": None,
                "protocol": 2,
                # The circuit breaker paces attempts.
                "retry": Retry(NoBackoff(), 0),
            },
        )
        master = self._sentinel.master_for(address.master, ssl=address.tls, **options)
        # One node under the master's name: the breaker and the logs follow the role.
        super().__init__(f"sentinel:{address.master}", master.connection_pool.make_connection)

    def close(self) -> None:
        for sentinel in self._sentinel.sentinels:
            sentinel.close()


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
        # One thread at a time; the others go on with the present map, if there is one.
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
        # Before the look, so that a change reported meanwhile is not lost.
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
            # A cluster that has lost one of three masters still has two thirds of the chunks.
            require_full_coverage=False,
            ssl=self._tls,
            **options,
        )


def make_topology(config: RedisTierConfig, clock: Callable[[], float]) -> Topology:
    match config.address.kind:
        case TopologyKind.SINGLE:
            return SingleTopology(config)
        case TopologyKind.SENTINEL:
            return SentinelTopology(config)
        case TopologyKind.CLUSTER:
            return ClusterTopology(config, clock)
