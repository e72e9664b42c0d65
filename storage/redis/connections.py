"""The connections of one thread, one per node, behind the node's circuit breaker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from redis import Connection
from redis.exceptions import MovedError, RedisError

from lmcache_connector.net.wire import Wire
from lmcache_connector.storage.redis.circuit_breaker import Backoff, CircuitBreaker, CircuitState
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.topology import CONNECT_ERRORS, Node, Topology, take_socket
from lmcache_connector.storage.redis.value_names import probe_key

logger = logging.getLogger(__name__)


class UnavailableError(Exception):
    """No connection to a node can be had now. ``reason`` names the counter it goes to."""

    reason = "unavailable"


@dataclass
class Servers:
    """What all threads of a tier share about its servers."""

    config: RedisTierConfig
    topology: Topology
    clock: Callable[[], float]
    random: Callable[[], float]
    # Called once with the first connection made, to look at the server's settings.
    greet: Callable[[Connection], None] = lambda connection: None
    _breakers: dict[Node, CircuitBreaker] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _greeted: bool = False
    _troubled: bool = False

    def breaker(self, node: Node) -> CircuitBreaker:
        with self._lock:
            if node not in self._breakers:
                config = self.config
                backoff = Backoff(
                    config.backoff_min_seconds, config.backoff_max_seconds, self.random
                )
                self._breakers[node] = CircuitBreaker(backoff, self.clock)
            return self._breakers[node]

    def is_open(self, node: Node) -> bool:
        return self.breaker(node).state is CircuitState.OPEN

    def states(self) -> tuple[tuple[str, str], ...]:
        """``(node, circuit state)`` of every node met so far."""
        with self._lock:
            return tuple((str(n), b.state.value) for n, b in sorted(self._breakers.items()))

    def report(self, trouble: str | None, error: Exception | None = None) -> None:
        """Log the first of a row of troubles that belong to no one node."""
        with self._lock:
            news, self._troubled = trouble is not None and not self._troubled, trouble is not None
        if news:
            logger.warning("redis %s: %s: %s", self.config.address, trouble, self.redact(error))

    def redact(self, message: object) -> str:
        return self.config.address.redact(str(message))

    def greet_once(self, connection: Connection) -> None:
        with self._lock:
            first, self._greeted = not self._greeted, True
        if first:
            self.greet(connection)


class Connections:
    """Not thread-safe: one thread owns it. ``idle_seconds``: see `Wire`."""

    def __init__(self, servers: Servers, idle_seconds: float) -> None:
        self._servers = servers
        self._idle_seconds = idle_seconds
        self._wires: dict[Node, Wire] = {}

    def get(self, node: Node) -> Wire:
        """A live connection, made now if there is none. Raises `UnavailableError`."""
        wire = self._wires.get(node)
        if wire is not None and wire.is_fresh():
            return wire
        self._close(node)
        if not self._servers.breaker(node).may_connect():
            raise UnavailableError(f"{node}: circuit open")
        self._wires[node] = wire = self._connect(node)
        return wire

    def succeeded(self, node: Node) -> None:
        self._servers.breaker(node).succeeded()

    def drop(self, node: Node, detail: str, *, blame: bool) -> None:
        """Close the connection to ``node``; with ``blame`` its breaker counts a failure."""
        self._close(node)
        self._servers.topology.mark_stale()
        if blame and self._servers.breaker(node).failed():
            detail = self._servers.redact(detail)
            logger.warning("redis %s: %s; leaving it alone for a while", node, detail)

    def refresh(self) -> None:
        """Learn what has changed about the servers, if something has."""
        try:
            self._servers.topology.prepare()
        except CONNECT_ERRORS as error:
            self._servers.report("cannot learn where chunks live", error)
            return
        self._servers.report(None)

    def tend(self) -> None:
        """Connect ahead of need wherever there is no connection and it is time to try."""
        self.refresh()
        for node in self._wires.keys() - set(self._servers.topology.nodes()):
            self._close(node)
        for node in self._servers.topology.nodes():
            breaker = self._servers.breaker(node)
            if node not in self._wires or breaker.state is CircuitState.OPEN:
                try:
                    self.get(node)
                except UnavailableError:
                    continue

    def close(self) -> None:
        for node in list(self._wires):
            self._close(node)

    def _close(self, node: Node) -> None:
        wire = self._wires.pop(node, None)
        if wire is not None:
            wire.close()

    def _connect(self, node: Node) -> Wire:
        servers = self._servers
        breaker = servers.breaker(node)
        try:
            connection = servers.topology.connect(node)
            try:
                self._say_hello(connection)
                sock = take_socket(connection)
            finally:
                connection.disconnect()
        except CONNECT_ERRORS as error:
            servers.topology.mark_stale()
            if breaker.failed(at_once=True):
                logger.warning("redis %s: cannot connect: %s", node, servers.redact(error))
            raise UnavailableError(f"{node}: cannot connect") from error
        if breaker.connected():
            logger.info("redis %s: connected again", node)
        return Wire(sock, servers.clock, self._idle_seconds)

    def _say_hello(self, connection: Connection) -> None:
        """One round trip with a command the tier may use anyway: proves that the server answers
        (some accept connections while loading) and that these credentials will do."""
        connection.send_command("EXISTS", probe_key(self._servers.config.namespace))
        try:
            answer = connection.read_response()
        except MovedError:
            answer = 0  # a cluster's node: the key is another's, but it answers
        if not isinstance(answer, int):
            raise RedisError("an unexpected answer to EXISTS")
        self._servers.greet_once(connection)
