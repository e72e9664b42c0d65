"""Which server holds a key, and how to connect to it.

A *node* is a server's name: ``host:port``, a socket path, or ``sentinel:`` and a master's name.
Topologies are thread-safe. `Topology.prepare` and `Topology.connect` do network I/O, so they run on
background threads; `Topology.node_of` does none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NewType

from lmcache_connector.storage.redis.client.dial import (
    CONNECTION_ERRORS,
    Check,
    Client,
    Dialer,
    ReplicaError,
    UnreachableError,
    is_endpoint,
    is_rejected_by_server,
    key_slot,
    require_master,
)
from lmcache_connector.storage.redis.client.url import TopologyKind
from lmcache_connector.storage.redis.config import RedisTierConfig

Node = NewType("Node", str)
Endpoint = tuple[str, int]

NUM_SLOTS = 16384
# Redis advises clusters of at most 1,000 nodes. A map of 16,384 ranges of one slot, with three
# nodes each, has some megabytes.
MAX_NODES = 1000
MAX_SLOTS_BYTES = 8 << 20

# Seconds between two reads of the slot map, however many errors request one; doubled while maps go
# stale quickly.
_MIN_SECONDS, _MAX_SECONDS = 0.25, 4.0
# Nodes of the current map that are asked for a new one, beside those of the URL.
_MAX_ASKED = 8


class Topology:
    """One server, reached by TCP, TLS or Unix socket, that holds all keys."""

    def __init__(self, config: RedisTierConfig, clock: Callable[[], float], name: str = "") -> None:
        self._address = config.address
        seconds = config.connect_timeout_seconds, config.read_timeout_seconds
        self._dialer = Dialer(config.address, *seconds, clock)
        self._hosts = config.address.hosts or (("", 0),)
        self._node = Node(name or config.address.path or _name(self._hosts[0]))

    def prepare(self) -> None:
        """Learn where keys are stored. Raises one of ``CONNECTION_ERRORS``."""

    def is_current(self) -> bool:
        """Whether `prepare` has nothing to do."""
        return True

    def node_of(self, key: bytes) -> Node | None:
        """The node that holds ``key``; None if not known yet."""
        return self._node

    def nodes(self) -> tuple[Node, ...]:
        """All known nodes."""
        return (self._node,)

    def connect(self, node: Node, max_bytes: int, *checks: Check) -> Client:
        """A connected, authenticated client that passes the checks. ``max_bytes``: of the replies
        to one command. Raises one of ``CONNECTION_ERRORS``, or what a check raises."""
        return self._dialer.connect(*self._hosts[0], max_bytes, *checks)

    def mark_stale(self) -> None:
        """A server did not answer: the next `prepare` looks again, if that can help."""

    def redirected(self, node: Node) -> None:
        """``node`` redirected a command: the next `prepare` looks again."""


class SentinelTopology(Topology):
    """The master that the sentinels of the URL name; they are asked before each connection. One may
    have missed a failover: if it names a replica, or a server that hangs or fails a check, another
    is asked, and this one last from then on. A replica, which serves reads, is used if nobody names
    a master. The node has the master's name, so that breaker and logs follow the role."""

    def __init__(self, config: RedisTierConfig, clock: Callable[[], float]) -> None:
        super().__init__(config, clock, f"sentinel:{config.address.master}")

    def connect(self, node: Node, max_bytes: int, *checks: Check) -> Client:
        problems: list[tuple[bool, bool, bool, Exception]] = []
        named: set[Endpoint] = set()
        replica: Endpoint | None = None
        for sentinel in self._hosts:
            server: Endpoint | None = None
            try:
                server = self._ask(sentinel)
                if server not in named:
                    named.add(server)
                    return self._dialer.connect(*server, max_bytes, *checks, require_master)
            except ReplicaError:
                replica = server
            except CONNECTION_ERRORS as problem:
                # What a server says counts most: whether other connections to it go on.
                is_away = isinstance(problem, UnreachableError)
                weight = server is not None, is_rejected_by_server(problem), not is_away
                problems.append((*weight, problem))
            self._hosts = (*(other for other in self._hosts if other != sentinel), sentinel)
        if replica is not None:
            return self._dialer.connect(*replica, max_bytes, *checks)
        *_, error = max(problems, key=itemgetter(slice(3)))
        raise error

    def _ask(self, sentinel: Endpoint) -> Endpoint:
        with self._dialer.connect_sentinel(*sentinel) as client:
            name, port = client.sentinel_get_master_addr_by_name(self._address.master) or (b"", 0)
        host = name.decode("ascii", "replace")
        if not is_endpoint(host, port):
            raise ValueError("the sentinel names no master")
        return host, port


@dataclass(frozen=True, slots=True)
class _Map:
    """Owner of each slot and endpoint of each node, from one reply."""

    owners: Mapping[int, Node]
    endpoints: Mapping[Node, Endpoint]


class ClusterTopology(Topology):
    """The masters of a cluster. The slot map is read at the first `prepare`, and again after a
    redirection, a broken or refused connection, and while a requested slot has no owner. The node
    that redirected last is asked before those of the URL: its map agrees with its ``MOVED``, while
    theirs may stay outdated."""

    def __init__(self, config: RedisTierConfig, clock: Callable[[], float]) -> None:
        super().__init__(config, clock)
        self._clock = clock
        self._map = _Map({}, {})
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
        owner = self._map.owners.get(key_slot(key))
        if owner is None:
            self._stale = True  # the slot had no owner; it may have one by now
        return owner

    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._map.endpoints)

    def connect(self, node: Node, max_bytes: int, *checks: Check) -> Client:
        try:
            host, port = self._map.endpoints[node]
        except KeyError:
            raise OSError("it has left the cluster") from None
        return self._dialer.connect(host, port, max_bytes, *checks)

    def mark_stale(self) -> None:
        self._stale = True

    def redirected(self, node: Node) -> None:
        if (endpoint := self._map.endpoints.get(node)) is not None:
            self._asked_first = (endpoint,)
        self._stale = True

    def _refresh(self) -> None:
        # First, so that a change reported during the look is not lost.
        self._stale = False
        try:
            slots = self._fetch_slots()
        except BaseException:  # look again
            self._stale = True
            raise
        names = {endpoint: _name(endpoint) for endpoint in dict.fromkeys(slots.values())}
        owners = {slot: names[endpoint] for slot, endpoint in slots.items()}
        self._map = _Map(owners, {node: endpoint for endpoint, node in names.items()})

    def _fetch_slots(self) -> Mapping[int, Endpoint]:
        """The slot map of the first node that answers."""
        known = tuple(self._map.endpoints.values())[:_MAX_ASKED]
        error: Exception = OSError("no node")
        for endpoint in dict.fromkeys((*self._asked_first, *self._hosts, *known)):
            try:
                with self._dialer.connect(*endpoint, MAX_SLOTS_BYTES) as client:
                    return parse_slots(client.execute_command("CLUSTER", "SLOTS"), endpoint)
            except CONNECTION_ERRORS as problem:
                error = problem
        raise error


def parse_slots(reply: Any, asked: Endpoint) -> Mapping[int, Endpoint]:
    """The master of each slot, from the reply of node ``asked`` to ``CLUSTER SLOTS``. Raises one of
    ``CONNECTION_ERRORS`` if malformed, or with more slots or nodes than a cluster has."""
    owners: dict[int, Endpoint] = {}
    nodes: set[Endpoint] = set()
    num_slots = 0
    for first, last, (name, port, *_), *_ in reply:
        # An empty name stands for the address of the asked node.
        node = name.decode("ascii", "replace") if name else asked[0], port
        nodes.add(node)
        # Bounds the work, however many ranges there are.
        num_slots += last + 1 - first
        if not 0 <= first <= last < NUM_SLOTS or num_slots > NUM_SLOTS or len(nodes) > MAX_NODES:
            raise ValueError("more slots or nodes than a cluster has")
        if not is_endpoint(*node):
            raise ValueError("a node without an address")
        owners.update(dict.fromkeys(range(first, last + 1), node))
    return owners


def _name(endpoint: Endpoint) -> Node:
    return Node(f"{endpoint[0]}:{endpoint[1]}")


def make_topology(config: RedisTierConfig, clock: Callable[[], float]) -> Topology:
    kinds = {TopologyKind.SENTINEL: SentinelTopology, TopologyKind.CLUSTER: ClusterTopology}
    return kinds.get(config.address.kind, Topology)(config, clock)
