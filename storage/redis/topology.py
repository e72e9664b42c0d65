"""Which server holds a key, and how to connect to it.

A *node* is a server's name: ``host:port``, a socket path, or ``sentinel:`` and a master's name.
Topologies are thread-safe. `Topology.prepare` and `Topology.connect` do network I/O and belong in
threads that nobody waits for; `Topology.node_of` never does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NewType, Protocol

from lmcache_connector.net.wire import WireError, WireFault
from lmcache_connector.storage.redis.client.conversation import (
    Conversation,
    ErrorReply,
    RefusedError,
)
from lmcache_connector.storage.redis.client.dial import TALK_ERRORS, Dialer, is_endpoint
from lmcache_connector.storage.redis.client.resp import command
from lmcache_connector.storage.redis.client.slot_map import (
    SLOTS_LIMITS,
    Endpoint,
    key_slot,
    parse_slots,
)
from lmcache_connector.storage.redis.client.url import TopologyKind
from lmcache_connector.storage.redis.config import RedisTierConfig

Node = NewType("Node", str)

# Between two looks at the slot map, however many errors ask for one. Each is twice the one before,
# as long as the map does not hold.
_MIN_SECONDS, _MAX_SECONDS = 0.25, 4.0
# Nodes of the present map that are asked for a new one, beside those of the URL.
_MAX_ASKED = 8


class Topology(Protocol):
    def prepare(self) -> None:
        """Learn what `node_of` needs to know. Raises one of ``TALK_ERRORS``."""
        ...

    def is_current(self) -> bool:
        """Whether `prepare` has nothing to do."""
        ...

    def node_of(self, key: bytes) -> Node | None:
        """The node that holds ``key``, None while that is not known."""
        ...

    def nodes(self) -> tuple[Node, ...]:
        """All nodes known now."""
        ...

    def connect(self, node: Node) -> Conversation:
        """A connection with credentials accepted. Raises one of ``TALK_ERRORS``."""
        ...

    def mark_stale(self) -> None:
        """Look again at the next `prepare`: a server's silence suggests that something has
        changed."""
        ...

    def redirected(self, node: Node) -> None:
        """Look again at the next `prepare`: ``node`` says that a key lives elsewhere."""
        ...


class _OneNode:
    """A topology of one node that is known from the start. ``dial()`` connects to it."""

    def __init__(self, node: str, dial: Callable[[], Conversation]) -> None:
        self._node = Node(node)
        self._dial = dial

    def prepare(self) -> None:
        return

    def is_current(self) -> bool:
        return True

    def node_of(self, key: bytes) -> Node | None:
        return self._node

    def nodes(self) -> tuple[Node, ...]:
        return (self._node,)

    def connect(self, node: Node) -> Conversation:
        return self._dial()

    def mark_stale(self) -> None:
        return

    def redirected(self, node: Node) -> None:
        return


class SingleTopology(_OneNode):
    """One server, reached by TCP, TLS or a Unix socket."""

    def __init__(self, config: RedisTierConfig, clock: Callable[[], float]) -> None:
        dialer, address = make_dialer(config, clock), config.address
        ((host, port),) = address.hosts or (("", 0),)
        super().__init__(address.path or f"{host}:{port}", lambda: dialer.connect(host, port))


class SentinelTopology(_OneNode):
    """The master that a group of sentinels names, asked again for every connection. A master
    demoted later still serves reads, which are verified; it refuses writes."""

    def __init__(self, config: RedisTierConfig, clock: Callable[[], float]) -> None:
        self._dialer = make_dialer(config, clock)
        self._master = config.address.master
        self._sentinels = list(config.address.hosts)
        # One node under the master's name: the breaker and the logs follow the role.
        super().__init__(f"sentinel:{self._master}", self._connect)

    def _connect(self) -> Conversation:
        error: Exception = OSError("no sentinel")
        for sentinel in tuple(self._sentinels):
            try:
                host, port = self._ask(sentinel)
                return self._dialer.connect(host, port)
            except TALK_ERRORS as problem:
                error = problem
                self._put_last(sentinel)
        raise error

    def _ask(self, sentinel: Endpoint) -> Endpoint:
        question = command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._master.encode())
        conversation = self._dialer.connect_sentinel(*sentinel)
        try:
            (reply,) = conversation.ask(question)
        finally:
            conversation.close()
        match reply:
            case ErrorReply():
                raise RefusedError(reply)
            case [bytes(name), bytes(digits)] if digits.isdigit() and len(digits) <= 5:
                host, port = name.decode("ascii", "replace"), int(digits)
                if is_endpoint(host, port):
                    return host, port
        raise WireError(WireFault.OUT_OF_STEP, "the sentinel names no master")

    def _put_last(self, sentinel: Endpoint) -> None:
        """The next connection asks another one first."""
        others = [other for other in self._sentinels if other != sentinel]
        self._sentinels = [*others, sentinel]


@dataclass(frozen=True, slots=True)
class _Map:
    """The node of each slot, and where each node is: always of one look."""

    owners: Mapping[int, Endpoint]
    endpoints: Mapping[Node, Endpoint]
    names: Mapping[Endpoint, Node]


class ClusterTopology:
    """The masters of a cluster. The slot map is read at the first `prepare`, and again after a
    redirection, a broken connection or a refused one, and while a slot that is asked for belongs to
    nobody. From then on the node that redirected is asked for the map before those of the URL: its
    map names the owner that its ``MOVED`` names, and theirs may be old for ever."""

    def __init__(self, config: RedisTierConfig, clock: Callable[[], float]) -> None:
        self._dialer = make_dialer(config, clock)
        self._hosts = config.address.hosts
        self._clock = clock
        self._map = _Map({}, {}, {})
        self._stale = True
        self._asked_first: tuple[Endpoint, ...] = ()
        self._next_look = float("-inf")
        self._pause = _MIN_SECONDS
        self._refreshing = threading.Lock()

    def prepare(self) -> None:
        with self._refreshing:
            if self.is_current():
                return
            has_held = self._clock() - self._next_look >= self._pause
            self._pause = _MIN_SECONDS if has_held else min(2 * self._pause, _MAX_SECONDS)
            try:
                self._refresh()
            finally:
                self._next_look = self._clock() + self._pause

    def is_current(self) -> bool:
        is_known = bool(self._map.owners) and not self._stale
        return is_known or self._clock() < self._next_look

    def node_of(self, key: bytes) -> Node | None:
        slots = self._map
        owner = slots.owners.get(key_slot(key))
        if owner is None:
            self._stale = True  # nobody served that slot when we looked; somebody may by now
            return None
        return slots.names[owner]

    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._map.endpoints)

    def connect(self, node: Node) -> Conversation:
        try:
            host, port = self._map.endpoints[node]
        except KeyError:
            raise OSError("it has left the cluster") from None
        return self._dialer.connect(host, port)

    def mark_stale(self) -> None:
        self._stale = True

    def redirected(self, node: Node) -> None:
        if (endpoint := self._map.endpoints.get(node)) is not None:
            self._asked_first = (endpoint,)
        self._stale = True

    def _refresh(self) -> None:
        # Before the look, so that a change reported meanwhile is not lost.
        self._stale = False
        try:
            slots = self._look()
        except BaseException:  # whatever it was, the next look may fare better
            self._stale = True
            raise
        names = {endpoint: _name(endpoint) for endpoint in dict.fromkeys(slots.values())}
        self._map = _Map(slots, {node: endpoint for endpoint, node in names.items()}, names)

    def _look(self) -> Mapping[int, Endpoint]:
        """The slot map of the first node that answers."""
        known = tuple(self._map.endpoints.values())[:_MAX_ASKED]
        error: Exception = OSError("no node")
        for endpoint in dict.fromkeys((*self._asked_first, *self._hosts, *known)):
            try:
                conversation = self._dialer.connect(*endpoint)
                try:
                    (reply,) = conversation.ask(command(b"CLUSTER", b"SLOTS"), limits=SLOTS_LIMITS)
                finally:
                    conversation.close()
                if isinstance(reply, ErrorReply):
                    raise RefusedError(reply)
                return parse_slots(reply, endpoint)
            except TALK_ERRORS as problem:
                error = problem
        raise error


def _name(endpoint: Endpoint) -> Node:
    return Node(f"{endpoint[0]}:{endpoint[1]}")


def make_dialer(config: RedisTierConfig, clock: Callable[[], float]) -> Dialer:
    seconds = config.connect_timeout_seconds, config.read_timeout_seconds
    return Dialer(config.address, *seconds, clock)


def make_topology(config: RedisTierConfig, clock: Callable[[], float]) -> Topology:
    match config.address.kind:
        case TopologyKind.SINGLE:
            return SingleTopology(config, clock)
        case TopologyKind.SENTINEL:
            return SentinelTopology(config, clock)
        case TopologyKind.CLUSTER:
            return ClusterTopology(config, clock)
