"""Connections to the servers, each behind the circuit breaker of its node.

Separate threads connect, so that an unresponsive server delays no reads from other servers.
"""

from __future__ import annotations

import contextlib
import logging
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
    is_rejected_by_server,
    take_socket,
)
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.topology import Node, Topology
from lmcache_connector.storage.redis.value_names import probe_key

logger = logging.getLogger(__name__)

# Connecting threads of one tier or look-up.
_MAX_DIALS = 16
_MAX_BREAKERS = 2048
# A server that transfers less within a time-out counts as silent.
_IDLE_BYTES = 64 << 10


class UnavailableError(Exception):
    """No connection to the node is available now."""


class Servers:
    """Shared state of a tier's servers. Thread-safe.

    ``clock`` returns seconds, ``random`` numbers in [0, 1). ``greet`` is called once, with the
    first connection, to check the server's settings. ``kind``: the server's name in logs.
    """

    def __init__(
        self,
        config: RedisTierConfig,
        topology: Topology,
        clock: Callable[[], float],
        random: Callable[[], float],
        greet: Callable[[Client], None] = lambda client: None,
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
        self._look: threading.Event | None = None  # set when the latest look-up of nodes has ended

    def breaker(self, node: Node) -> CircuitBreaker:
        """Open while the node does not answer."""
        return self._of(self._breakers, node)

    def pause(self, node: Node) -> CircuitBreaker:
        """A circuit breaker that is open while the node refuses writes."""
        return self._of(self._pauses, node)

    def is_paused(self, node: Node) -> bool:
        return (self.pause(node).seconds_until_retry() or 0.0) > 0.0

    def any_paused(self) -> bool:
        with self._lock:
            return any(p.state is CircuitState.OPEN for p in self._pauses.values())

    def is_open(self, node: Node) -> bool:
        return self.breaker(node).state is CircuitState.OPEN

    def states(self) -> tuple[tuple[str, CircuitState], ...]:
        """``(node, circuit state)`` of every current node asked so far."""
        nodes = set(self.topology.nodes())
        with self._lock:
            known = sorted(self._breakers.items())
        return tuple((str(node), breaker.state) for node, breaker in known if node in nodes)

    def refresh(self, deadline: Deadline | None = None) -> None:
        """Start updating the topology in the background if it may have changed. Waits, until
        ``deadline``, only if no node is known yet."""
        if self.topology.is_current():
            return
        with self._lock:
            if self._look is None or self._look.is_set():
                self._look = self._start(self._learn)
            look = self._look
        if look is not None and deadline is not None and not self.topology.nodes():
            deadline.wait(look)

    def dial(self, node: Node, idle_seconds: float) -> Dial | None:
        """Start connecting; ``None`` if too many connections are being made."""
        dial = Dial(node, idle_seconds, self)
        with self._lock:
            done = self._start(dial.run)
        if done is None:
            return None
        dial.done = done
        return dial

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
        client = self.topology.connect(node, max_bytes)
        try:
            with contextlib.suppress(*REDIRECTIONS):
                client.exists(probe_key(self.config.namespace))
            with self._lock:
                first, self._greeted = not self._greeted, True
            if first:
                self._greet(client)
        except BaseException:
            client.close()
            raise
        return client

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

    def _start(self, work: Callable[[], None]) -> threading.Event | None:
        """Run ``work`` on its own thread. Returns an event that is set at its end, ``None`` if
        there are too many threads. Under the lock."""
        done = threading.Event()

        def run() -> None:
            try:
                work()
            except Exception:
                logger.exception("connecting to redis failed")
            finally:
                done.set()
                self._task_ended()

        if self._num_dials >= _MAX_DIALS:
            return None
        try:
            threading.Thread(target=run, name="lmc-redis-dial", daemon=True).start()
        except RuntimeError:  # the system is out of threads
            return None
        self._num_dials += 1
        return done

    def _task_ended(self) -> None:
        with self._lock:
            self._num_dials -= 1

    def _of(self, breakers: dict[Node, CircuitBreaker], node: Node) -> CircuitBreaker:
        if (known := breakers.get(node)) is not None:
            return known
        with self._lock:
            if node not in breakers:
                if len(breakers) >= _MAX_BREAKERS:  # drop those of nodes from past requests
                    known_now = set(self.topology.nodes())
                    for other in breakers.keys() - known_now:
                        del breakers[other]
                low, high = self.config.backoff_min_seconds, self.config.backoff_max_seconds
                breakers[node] = CircuitBreaker(low, high, self._random, self.clock)
            return breakers[node]


class Dial:
    """A connection being made. Whoever started it calls `take` or `abandon`."""

    def __init__(self, node: Node, idle_seconds: float, servers: Servers) -> None:
        self.done = threading.Event()
        self._node = node
        self._idle_seconds = idle_seconds
        self._servers = servers
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._abandoned = False

    @property
    def has_failed(self) -> bool:
        return self.done.is_set() and self._wire is None

    def take(self, deadline: Deadline) -> Wire | None:
        """The connection; ``None`` if not ready by ``deadline``. Raises `UnavailableError`."""
        if not deadline.wait(self.done):
            return None
        if self._wire is None:
            raise UnavailableError(f"{self._node}: cannot connect")
        return self._wire

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            if self._wire is not None:
                self._wire.close()

    def run(self) -> None:
        """Runs on its own thread."""
        servers, node = self._servers, self._node
        breaker = servers.breaker(node)
        try:
            with servers.connect(node) as client:
                wire = Wire(take_socket(client), servers.clock, self._idle_seconds, _IDLE_BYTES)
        except Exception as error:
            servers.topology.mark_stale()
            if breaker.failed(at_once=not is_rejected_by_server(error)):
                detail = servers.redact(error)
                logger.warning("%s %s: cannot connect: %s", servers.kind, node, detail)
            if not isinstance(error, CONNECTION_ERRORS):
                raise
            return
        if breaker.connected():
            logger.info("%s %s: connected again", servers.kind, node)
        with self._lock:
            self._wire = wire
            if self._abandoned:
                wire.close()


class Connections:
    """One thread's connections, one per node. ``idle_seconds``: see `Wire`. ``owing``: those with
    answers still to come, which on any other would be unrequested bytes."""

    def __init__(self, servers: Servers, idle_seconds: float, owing: Container[Wire] = ()) -> None:
        self._owing = owing
        self._servers = servers
        self._idle_seconds = idle_seconds
        self._wires: dict[Node, Wire] = {}
        self._dials: dict[Node, Dial] = {}

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
        is_away = self._servers.is_open(node)
        dial = self._dials.get(node)
        if dial is None or dial.has_failed:  # an earlier attempt failed: try again
            dial = self._dial(node)
        try:
            made = dial.take(self._now() if is_away else deadline)
        except UnavailableError:
            del self._dials[node]
            raise
        if made is None:
            raise UnavailableError(f"{node}: still connecting")
        del self._dials[node]
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
        """Start connecting to every node that has no live connection and may be tried."""
        self._servers.refresh()
        known = set(filter(is_wanted, self._servers.topology.nodes()))
        for node in self._wires.keys() - known:
            self._close(node)
        for node in self._dials.keys() - known:
            self._dials.pop(node).abandon()
        for node in known:
            if self._servers.breaker(node).seconds_until_retry() == 0.0:
                self._close(node)  # only a new connection shows whether the node is back
            with contextlib.suppress(UnavailableError):
                self.get(node, self._now())

    def close(self) -> None:
        for node in list(self._wires):
            self._close(node)
        while self._dials:
            self._dials.popitem()[1].abandon()

    def _dial(self, node: Node) -> Dial:
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
    """Warn if the server has neither a memory limit nor eviction: cached chunks would fill the
    machine's memory. Raises one of ``CONNECTION_ERRORS``."""
    try:
        facts = client.info("memory")
    except ResponseError:
        return  # no permission
    if facts.get("maxmemory", 0) == 0 and facts.get("maxmemory_policy") == "noeviction":
        logger.warning(
            "this redis server has no maxmemory and the policy noeviction: cached chunks will fill "
            "its memory. Set maxmemory and maxmemory-policy allkeys-lru, or redis_ttl_seconds."
        )
