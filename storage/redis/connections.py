"""Connections to the servers, each behind the circuit breaker of its node.

Separate threads connect, so that an unresponsive server delays no reads from other servers.
"""

from __future__ import annotations

import contextlib
import logging
import random as random_module
import threading
from collections.abc import Callable, Container

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitBreaker, CircuitState
from lmcache_connector.storage.redis.client.dial import (
    CONNECTION_ERRORS,
    REDIRECTIONS,
    SMALL_BYTES,
    Client,
    ResponseError,
    disable_reconnect,
    is_rejected_by_server,
    take_socket,
)
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.topology import Node, Topology
from lmcache_connector.storage.redis.value_names import probe_key
from lmcache_connector.threads import Task

logger = logging.getLogger(__name__)

# Threads of one tier or lookup that connect or read the slot map.
_MAX_DIALS = 16
_MAX_BREAKERS = 2048
# A server that transfers less within a time-out counts as silent.
_IDLE_BYTES = 64 << 10


class UnavailableError(Exception):
    """No connection to the node is available now."""


class Servers:
    """Shared state of a tier's servers. Thread-safe.

    ``clock`` returns seconds, ``random`` numbers in [0, 1). ``greet`` is called once, with the
    first connection, to check the server's settings. ``kind``: of the servers, for logs.
    """

    def __init__(
        self,
        config: RedisTierConfig,
        topology: Topology,
        clock: Callable[[], float],
        random: Callable[[], float] = random_module.random,
        greet: Callable[[Client], None] | None = None,
        kind: str = "redis",
    ) -> None:
        self.kind = kind
        self.config = config
        self.topology = topology
        self.clock = clock
        self._random = random
        self._greet = greet
        self._lock = threading.Lock()
        self._breakers: dict[Node, CircuitBreaker] = {}
        self._pauses: dict[Node, CircuitBreaker] = {}
        self._greeted = False
        self._forbidding = set[Node]()
        self._troubled = False
        self._num_dials = 0
        self._look: Task[Wire] | None = None  # the latest update of the topology

    def breaker(self, node: Node) -> CircuitBreaker:
        """A circuit breaker that is open while the node does not answer."""
        return self._of(self._breakers, node)

    def pause(self, node: Node) -> CircuitBreaker:
        """A circuit breaker that is open while the node refuses writes."""
        return self._of(self._pauses, node)

    def is_paused(self, node: Node) -> bool:
        return (self.pause(node).seconds_until_retry() or 0.0) > 0.0

    def any_paused(self) -> bool:
        """Whether any current node refuses writes."""
        return any(state is CircuitState.OPEN for _, state in self._states(self._pauses))

    def is_open(self, node: Node) -> bool:
        return self.breaker(node).state is CircuitState.OPEN

    def states(self) -> tuple[tuple[str, CircuitState], ...]:
        """``(node, circuit state)`` of every current node asked so far."""
        return self._states(self._breakers)

    def _states(self, of: dict[Node, CircuitBreaker]) -> tuple[tuple[str, CircuitState], ...]:
        nodes = set(self.topology.nodes())
        with self._lock:
            known = sorted(of.items())
        return tuple((str(node), breaker.state) for node, breaker in known if node in nodes)

    def refresh(self, deadline: Deadline | None = None) -> None:
        """Start updating the topology in the background if it may have changed. Waits, until
        ``deadline``, only if no node is known yet."""
        if self.topology.is_current():
            return
        with self._lock:
            if self._look is None or self._look.is_done:
                self._look = self._start(self._learn)
            look = self._look
        if look is not None and deadline is not None and not self.topology.nodes():
            deadline.wait(look.wait)

    def dial(self, node: Node, idle_seconds: float) -> Task[Wire] | None:
        """Start connecting; ``None`` if too many connections are being made. The caller owns the
        connection; if the task is cancelled, it is closed."""
        with self._lock:
            return self._start(lambda: self._open(node, idle_seconds))

    def redact(self, message: object) -> str:
        """``message`` for a log, without credentials."""
        return self.config.address.redact(message)

    def forbids_reads(self, node: Node, detail: str) -> None:
        """``node`` works, but the credentials lack read permission: logged once per node."""
        with self._lock:
            is_new = node not in self._forbidding
            self._forbidding.add(node)
        if is_new:
            logger.warning("redis %s: reads are not permitted: %s", node, self.redact(detail))

    def connect(self, node: Node, max_bytes: int = SMALL_BYTES) -> Client:
        """Connect, and check that the server answers commands with these credentials. Some servers
        accept connections before they have loaded their data. ``max_bytes``: of the replies to one
        command. Raises one of ``CONNECTION_ERRORS``."""
        client = self.topology.connect(node, max_bytes, self._check)
        with self._lock:
            first, self._greeted = not self._greeted, True
        if first and self._greet is not None:
            try:
                self._greet(client)
            except BaseException:
                client.close()
                raise
        return client

    def _check(self, client: Client) -> None:
        disable_reconnect(client)  # a redialled connection would not be checked
        with contextlib.suppress(*REDIRECTIONS):
            client.exists(probe_key(self.config.namespace))

    def _open(self, node: Node, idle_seconds: float) -> Wire:
        breaker = self.breaker(node)
        try:
            with self.connect(node) as client:
                wire = Wire(take_socket(client), self.clock, idle_seconds, _IDLE_BYTES)
        except Exception as error:
            self.topology.mark_stale()
            if breaker.failed(at_once=not is_rejected_by_server(error)):
                logger.warning("%s %s: cannot connect: %s", self.kind, node, self.redact(error))
            raise
        if breaker.connected():
            logger.info("%s %s: connected again", self.kind, node)
        return wire

    def _learn(self) -> None:
        try:
            self.topology.prepare()
        except CONNECTION_ERRORS as error:
            is_new, self._troubled = not self._troubled, True
            if is_new:
                address, detail = self.config.address, self.redact(error)
                what = "cannot read which node holds which keys"
                logger.warning("%s %s: %s: %s", self.kind, address, what, detail)
        else:
            self._troubled = False

    def _start(self, work: Callable[[], Wire | None]) -> Task[Wire] | None:
        """Run ``work`` on its own thread; ``None`` if there are too many. Under the lock."""
        task = Task[Wire]()

        def run() -> None:
            wire = None
            try:
                wire = work()
            except CONNECTION_ERRORS:
                pass  # logged at the start of the episode
            except Exception:
                logger.exception("connecting to %s failed", self.kind)
            finally:
                task.settle(wire)
                if wire is not None and task.is_cancelled:
                    wire.close()
                with self._lock:
                    self._num_dials -= 1

        if self._num_dials >= _MAX_DIALS:
            return None
        try:
            threading.Thread(target=run, name="lmc-redis-dial", daemon=True).start()
        except RuntimeError:  # the system is out of threads
            return None
        self._num_dials += 1
        return task

    def _of(self, breakers: dict[Node, CircuitBreaker], node: Node) -> CircuitBreaker:
        if (known := breakers.get(node)) is not None:
            return known
        with self._lock:
            if node not in breakers:
                if len(breakers) >= _MAX_BREAKERS:  # drop those of nodes that are gone
                    known_now = set(self.topology.nodes())
                    for other in breakers.keys() - known_now:
                        del breakers[other]
                low, high = self.config.backoff_min_seconds, self.config.backoff_max_seconds
                breakers[node] = CircuitBreaker(low, high, self._random, self.clock)
            return breakers[node]


class Connections:
    """One thread's connections, one per node. ``idle_seconds``: see `Wire`. ``owing``: connections
    with replies still to come. Any other that has bytes to read is out of step, and is replaced."""

    def __init__(self, servers: Servers, idle_seconds: float, owing: Container[Wire] = ()) -> None:
        self._owing = owing
        self._servers = servers
        self._idle_seconds = idle_seconds
        self._wires: dict[Node, Wire] = {}
        self._dials: dict[Node, Task[Wire]] = {}

    def has(self, node: Node) -> bool:
        """Whether a connection to ``node`` exists; the server may have closed it."""
        return node in self._wires

    def get(self, node: Node, deadline: Deadline) -> Wire:
        """A live connection. Waits until ``deadline`` for a new one, except if the node's circuit
        is open. Raises `UnavailableError`."""
        wire = self._wires.get(node)
        if wire is not None and (wire in self._owing or wire.is_fresh()):
            return wire
        self._close(node)
        limit = self._now() if self._servers.is_open(node) else deadline
        dial = self._dials.get(node)
        if dial is None or (dial.is_done and dial.value is None):  # failed earlier: try again
            dial = self._dial(node)
        if not limit.wait(dial.wait):
            raise UnavailableError(f"{node}: still connecting")
        del self._dials[node]
        if (made := dial.value) is None:
            raise UnavailableError(f"{node}: cannot connect")
        self._wires[node] = made
        if not made.is_fresh():
            self._close(node)
            raise UnavailableError(f"{node}: closed again")
        return made

    def succeeded(self, node: Node) -> None:
        self._servers.breaker(node).succeeded()

    def drop(self, node: Node, detail: str, *, blame: bool, at_once: bool = False) -> None:
        """Close the connection. ``blame`` counts a failure of the node; with ``at_once`` its
        breaker opens."""
        self._close(node)
        self._servers.topology.mark_stale()
        if blame and self._servers.breaker(node).failed(at_once=at_once):
            kind, detail = self._servers.kind, self._servers.redact(detail)
            logger.warning("%s %s: %s; the circuit breaker opens", kind, node, detail)

    def maintain(self, is_wanted: Callable[[Node], bool] = lambda node: True) -> None:
        """Start connecting to every wanted node that may be tried; close connections to others."""
        self._servers.refresh()
        known = set(filter(is_wanted, self._servers.topology.nodes()))
        for node in self._wires.keys() - known:
            self._close(node)
        for node in self._dials.keys() - known:
            self._abandon(node)
        for node in known:
            if self._servers.breaker(node).seconds_until_retry() == 0.0:
                self._close(node)  # only a new connection shows whether the node is back
            with contextlib.suppress(UnavailableError):
                self.get(node, self._now())

    def close(self) -> None:
        for node in list(self._wires):
            self._close(node)
        for node in list(self._dials):
            self._abandon(node)

    def _abandon(self, node: Node) -> None:
        dial = self._dials.pop(node)
        dial.cancel()  # first: then the thread, or the next lines, close the connection
        if dial.value is not None:
            dial.value.close()

    def _dial(self, node: Node) -> Task[Wire]:
        self._dials.pop(node, None)
        if not self._servers.breaker(node).may_connect():
            raise UnavailableError(f"{node}: circuit open")
        dial = self._servers.dial(node, self._idle_seconds)
        if dial is None:
            raise UnavailableError(f"{node}: too many connections are being made")
        self._dials[node] = dial
        return dial

    def _now(self) -> Deadline:
        return Deadline(float("-inf"), self._servers.clock)

    def _close(self, node: Node) -> None:
        if (wire := self._wires.pop(node, None)) is not None:
            wire.close()


def warn_if_unbounded(client: Client) -> None:
    """Warn if the server has no memory limit, without which no policy evicts. Raises one of
    ``CONNECTION_ERRORS``."""
    try:
        facts = client.info("memory")
    except ResponseError:
        return  # no permission
    if facts.get("maxmemory") == 0:
        logger.warning(
            "this redis server has no maxmemory: cached chunks will fill its machine's memory. Set "
            "maxmemory and maxmemory-policy allkeys-lru, or redis_ttl_seconds."
        )
