"""Finds out which chunks of a prompt are in Redis, without reading them.

A lookup sends one multi-key ``EXISTS`` per chunk, all pipelined: one round trip per server. A
server that fails or is late affects only its own chunks. Late answers are read later, to keep the
connection; a late server is not asked until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_connector.kv_parts.hit import num_leading
from lmcache_connector.kv_parts.part import part_of
from lmcache_connector.net.deadline import Deadline, never
from lmcache_connector.net.wire import SLICE_SECONDS, Wire, WireError, WireFault, wait_readable
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.client.resp import command, first_line, is_redirection
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.topology import Node, make_topology
from lmcache_connector.storage.redis.value_names import chunk_tag, stripe_suffix

# Fraction of a lookup's time that may be spent connecting.
_CONNECT_SHARE = 0.5
_COUNT_BYTES = 20
# A server that owes an answer for longer is late, unless the last awaited answer took longer.
LATE_SECONDS = 0.02
# A server that owes an answer for longer is silent: a failure.
_SILENT_SECONDS = 1.0


class RedisLookup:
    """``geometries``: one per rank. A key exists only if all its values, of all ranks, exist.
    ``clock`` returns seconds. ``connect_share``: fraction of a lookup's time that may be spent
    connecting. Owned by one thread, except what is marked thread-safe."""

    def __init__(
        self,
        config: RedisTierConfig,
        geometries: Sequence[PartGeometries],
        *,
        clock: Callable[[], float] = time.monotonic,
        servers: Servers | None = None,
        connect_share: float = _CONNECT_SHARE,
    ) -> None:
        self._connect_share = connect_share
        self._config = config
        self.clock = clock
        self.learn_geometries(geometries)
        self._servers = servers or Servers(config, make_topology(config, clock), clock)
        self._owed: dict[Wire, list[NodeLookup]] = {}  # not answered yet, oldest first
        self._connections = Connections(self._servers, config.read_timeout_seconds, self._owed)

    @property
    def has_servers(self) -> bool:
        """Whether there is a server to ask. Thread-safe."""
        return True

    def learn_geometries(self, geometries: Sequence[PartGeometries]) -> None:
        """Replace the geometries of all ranks. Before the first lookup; thread-safe."""
        parts = zip(*(rank.parts for rank in geometries), strict=True)
        payload_bytes = self._config.max_payload_bytes
        self._suffixes = tuple(_suffixes(ranks, payload_bytes) for ranks in parts)

    def __repr__(self) -> str:
        return f"RedisLookup({self._config.address}, namespace={self._config.namespace!r})"

    def exists_prefix(
        self, keys: Sequence[bytes], deadline: float, cancelled: Callable[[], bool] = never
    ) -> int:
        """The number of leading keys that are complete in Redis; see `exist`."""
        return num_leading(self.exist(keys, deadline, cancelled))

    def exist(
        self, keys: Sequence[bytes], deadline: float, cancelled: Callable[[], bool] = never
    ) -> list[bool]:
        """Whether each key is known to be complete in Redis. Blocks until ``deadline`` at most, in
        seconds of ``clock``."""
        if not keys:
            return []
        limit = Deadline(deadline, self.clock, cancelled)
        node_lookups = self.ask(keys, limit)
        await_answers(node_lookups, limit)
        return self.found(keys, node_lookups)

    def maintain(self) -> None:
        """Connect ahead of need, and read late answers."""
        self._collect()
        self._connections.maintain()

    def close(self) -> None:
        self._connections.close()

    def servers(self) -> tuple[tuple[str, CircuitState], ...]:
        """Servers asked so far, with their circuit states. Thread-safe."""
        return self._servers.states()

    def ask(self, keys: Sequence[bytes], deadline: Deadline) -> list[NodeLookup]:
        """Ask every reachable server for the chunks it may hold."""
        self._servers.refresh(deadline)
        return self._send(keys, deadline)

    def found(self, keys: Sequence[bytes], node_lookups: Sequence[NodeLookup]) -> list[bool]:
        """Which ``keys`` are complete, according to the answers so far."""
        counts: dict[int, int] = {}
        for node_lookup in node_lookups:
            counts |= node_lookup.counts
        return [counts.get(i) == len(self._suffixes_of(key)) for i, key in enumerate(keys)]

    def _assign(self, keys: Sequence[bytes]) -> dict[Node, list[int]]:
        """Indices of the keys that each server may hold."""
        by_node: dict[Node, list[int]] = {}
        for index, key in enumerate(keys):
            node = self._servers.topology.node_of(self._tag(key))
            if node is not None:
                by_node.setdefault(node, []).append(index)
        return by_node

    def _send(self, keys: Sequence[bytes], deadline: Deadline) -> list[NodeLookup]:
        self._collect()
        late = {owed[0].node for owed in self._owed.values() if owed[0].is_late()}
        by_node = {n: indices for n, indices in self._assign(keys).items() if n not in late}
        connect_until = self.clock() + self._connect_share * deadline.remaining()
        connecting = Deadline(connect_until, self.clock, deadline.cancelled)
        node_lookups = []
        for node in sorted(by_node, key=self._connections.has, reverse=True):
            if not deadline.remaining():
                break  # to begin a command now would cost the connection
            asked = self._commands([keys[i] for i in by_node[node]])
            try:
                wire = self._connections.get(node, connecting)
                wire.send([asked], deadline)
            except UnavailableError:
                continue
            except WireError as error:
                self._connections.drop(node, str(error), blame=error.is_peers_fault)
                continue
            node_lookups.append(NodeLookup(self, node, wire, by_node[node], self.clock()))
            self._owed.setdefault(wire, []).append(node_lookups[-1])
        return node_lookups

    def _collect(self) -> None:
        """Read late answers."""
        now = self.clock()
        for wire, owed in list(self._owed.items()):
            while owed and wire.fileno() >= 0 and wait_readable([wire], 0.0):
                self.receive(owed[-1])
            if owed and wire.fileno() >= 0 and now - owed[0].asked_at > _SILENT_SECONDS:
                blame = not all(node_lookup.is_trial for node_lookup in owed)
                self._connections.drop(owed[0].node, "no answer in time", blame=blame)
            if wire.fileno() < 0:
                self._owed.pop(wire, None)

    def _commands(self, keys: Sequence[bytes]) -> bytes:
        names = ([self._tag(key) + suffix for suffix in self._suffixes_of(key)] for key in keys)
        return b"".join(command(b"EXISTS", *each) for each in names)

    def _tag(self, key: bytes) -> bytes:
        return chunk_tag(self._config.namespace, key)

    def _suffixes_of(self, key: bytes) -> tuple[bytes, ...]:
        """The ends of the names of ``key``'s values, of all ranks."""
        return self._suffixes[part_of(key, len(self._suffixes))]

    def receive(self, node_lookup: NodeLookup) -> bool:
        """Read replies that have arrived. True if the answer is complete or the connection
        failed."""
        wire, owed = node_lookup.wire, self._owed.get(node_lookup.wire, [])
        try:
            # The lookup's deadline, if over by now, would cost the connection.
            wire.receive_some(Deadline(self.clock() + _SILENT_SECONDS, self.clock))
            while node_lookup.indices and (line := wire.next_line()) is not None:
                self._take(owed[0], line)  # answers come in order
                if not owed[0].indices:
                    owed.pop(0).answered_at = self.clock()
        except WireError as error:
            self._connections.drop(node_lookup.node, str(error), blame=error.is_peers_fault)
            return True
        if node_lookup.indices:
            return False
        if not owed:
            del self._owed[wire]
        self._connections.succeeded(node_lookup.node)
        return True

    def _take(self, node_lookup: NodeLookup, line: bytes) -> None:
        """Count one reply; a redirection has no count. Raises ``WireError`` if it is malformed."""
        if line[:1] == b":" and line[1:].isdigit() and len(line) <= _COUNT_BYTES:
            node_lookup.counts[node_lookup.indices[0]] = int(line[1:])
        elif is_redirection(line):
            self._servers.topology.redirected(node_lookup.node)
        else:
            raise WireError(WireFault.OUT_OF_STEP, first_line(line))
        del node_lookup.indices[0]


def _suffixes(ranks: Sequence[ChunkGeometry], max_payload_bytes: int) -> tuple[bytes, ...]:
    """The ends of names, each once: ranks that hold the same head share its values."""
    stripes = [stripe for rank in ranks for stripe in rank.stripes(max_payload_bytes)]
    return tuple(dict.fromkeys(map(stripe_suffix, stripes)))


@dataclass(eq=False)
class NodeLookup:
    """A lookup at ``node``. ``indices``: chunks without a reply yet, in order of the replies.
    ``counts``: number of values found, by chunk. ``asked_at``, ``answered_at``: on the clock.
    ``is_trial``: no request waits for it, so its silence is no failure of the node."""

    asker: RedisLookup
    node: Node
    wire: Wire
    indices: list[int]
    asked_at: float
    counts: dict[int, int] = field(default_factory=dict)
    answered_at: float | None = None
    is_trial: bool = False

    def is_late(self) -> bool:
        """Whether it has taken longer than the last awaited answer, and than `LATE_SECONDS`."""
        patience = max(LATE_SECONDS, self.wire.round_trip_seconds)
        return self.answered_at is None and self.asker.clock() - self.asked_at > patience


def await_answers(
    node_lookups: Sequence[NodeLookup],
    deadline: Deadline,
    is_enough: Callable[[Sequence[NodeLookup]], bool] = lambda left: False,
) -> None:
    """Wait until all are answered, ``deadline``, or ``is_enough(unanswered ones)`` is true."""
    left = list(node_lookups)
    while left and deadline.remaining() > 0.0 and not is_enough(left):
        slice_seconds = min(SLICE_SECONDS, deadline.remaining())
        ready = wait_readable([node_lookup.wire for node_lookup in left], slice_seconds)
        for node_lookup in [q for q in left if q.wire in ready]:
            if node_lookup.asker.receive(node_lookup):
                left.remove(node_lookup)
                if (answered_at := node_lookup.answered_at) is not None:
                    node_lookup.wire.round_trip_seconds = answered_at - node_lookup.asked_at
