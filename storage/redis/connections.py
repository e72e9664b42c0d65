"""Connections to the servers, each behind the circuit breaker of its node."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from redis import Connection
from redis.exceptions import MovedError, RedisError, ResponseError

from lmcache_connector.net.wire import Wire
from lmcache_connector.storage.redis.circuit_breaker import Backoff, CircuitBreaker, CircuitState
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.topology import CONNECT_ERRORS, Node, Topology, take_socket
from lmcache_connector.storage.redis.value_names import probe_key

logger = logging.getLogger(__name__)


class UnavailableError(Exception):
    """No connection to a node can be had now."""


class Servers:
    """What all threads of a tier know about its servers. Thread-safe.

    ``clock`` returns seconds, ``random`` numbers in [0, 1). ``greet`` is called once, with the
    first connection made, to look at the server's settings.
    """

    def __init__(
        self,
        config: RedisTierConfig,
        topology: Topology,
        clock: Callable[[], float],
        random: Callable[[], float],
        greet: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        self.config = config
        self.topology = topology
        self.clock = clock
        self._random = random
        self._greet = greet
        self._lock = threading.Lock()
        self._breakers: dict[Node, CircuitBreaker] = {}
        self._greeted = False
        self._troubled = False

    def breaker(self, node: Node) -> CircuitBreaker:
        with self._lock:
            if node not in self._breakers:
                self._breakers[node] = self.make_breaker()
            return self._breakers[node]

    def make_breaker(self) -> CircuitBreaker:
        """A breaker with the configured back-off."""
        low, high = self.config.backoff_min_seconds, self.config.backoff_max_seconds
        return CircuitBreaker(Backoff(low, high, self._random), self.clock)

    def is_open(self, node: Node) -> bool:
        return self.breaker(node).state is CircuitState.OPEN

    def states(self) -> tuple[tuple[str, CircuitState], ...]:
        """``(node, circuit state)`` of every node asked so far."""
        with self._lock:
            return tuple((str(n), b.state) for n, b in sorted(self._breakers.items()))

    def refresh(self) -> None:
        """Learn where chunks live, if that may have changed; log the first failure in a row."""
        try:
            self.topology.prepare()
        except CONNECT_ERRORS as error:
            if self._set_troubled(True):
                address, detail = self.config.address, self.redact(error)
                logger.warning("redis %s: cannot learn where chunks live: %s", address, detail)
        else:
            self._set_troubled(False)

    def redact(self, message: object) -> str:
        """``message`` without credentials."""
        return self.config.address.redact(str(message))

    def greet_once(self, connection: Connection) -> None:
        """To be called with every new connection: the first is greeted."""
        with self._lock:
            first, self._greeted = not self._greeted, True
        if first:
            self._greet(connection)

    def _set_troubled(self, troubled: bool) -> bool:
        """Whether that is new."""
        with self._lock:
            changed, self._troubled = troubled != self._troubled, troubled
        return changed


class Connections:
    """One thread's connections, one per node. ``idle_seconds``: see `Wire`."""

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

    def tend(self) -> None:
        """Connect ahead of need to every node without a connection, when it is time to try."""
        self._servers.refresh()
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
                self._check(connection)
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

    def _check(self, connection: Connection) -> None:
        """Prove that the server answers these credentials: some servers accept connections before
        they have loaded their data. It takes one round trip, with a command the tier needs anyway.
        """
        connection.send_command("EXISTS", probe_key(self._servers.config.namespace))
        try:
            answer = connection.read_response()
        except MovedError:
            answer = 0  # another node of the cluster holds the key, but this one answers
        if not isinstance(answer, int):
            raise RedisError("an unexpected answer to EXISTS")
        self._servers.greet_once(connection)


def warn_of_noeviction(connection: Connection) -> None:
    """Warn of a server with no memory limit that evicts nothing: it grows until the machine has no
    memory left. Raises one of ``CONNECT_ERRORS``."""
    connection.send_command("INFO", "memory")
    try:
        info = connection.read_response()
    except ResponseError:
        return  # these credentials may not ask
    if not isinstance(info, bytes):
        raise RedisError("an unexpected answer to INFO")
    facts = dict(line.split(b":", 1) for line in info.split(b"\r\n") if b":" in line)
    if facts.get(b"maxmemory") == b"0" and facts.get(b"maxmemory_policy") == b"noeviction":
        logger.warning(
            "this redis server has no maxmemory and the policy noeviction: cached chunks will fill "
            "its memory. Set maxmemory and maxmemory-policy allkeys-lru, or redis_ttl_seconds."
        )
