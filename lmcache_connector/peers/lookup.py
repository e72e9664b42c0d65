"""Asks all peers at once which chunks they hold.

A lookup ends as soon as every chunk has been found. Late peers are ignored, and circuit breakers
keep dead peers from being asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import WireError, WireFault
from lmcache_connector.peers.commands import MAX_ASKED
from lmcache_connector.peers.topology import HOST_PREFIX, PeerTopology
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.client.resp import command, first_line
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.connections import Servers
from lmcache_connector.storage.redis.lookup import (
    LATE_SECONDS,
    NodeLookup,
    RedisLookup,
    await_answers,
)
from lmcache_connector.storage.redis.topology import Node


class PeerLookup(RedisLookup):
    """See `RedisLookup`. ``servers``: those of ``topology``, if shared with readers."""

    def __init__(
        self,
        config: RedisTierConfig,
        geometries: Sequence[PartGeometries],
        topology: PeerTopology,
        clock: Callable[[], float] = time.monotonic,
        *,
        servers: Servers | None = None,
        connect_share: float = 0.0,
    ) -> None:
        servers = servers or Servers(config, topology, clock, kind="peer")
        super().__init__(
            config, geometries, clock=clock, servers=servers, connect_share=connect_share
        )
        self._topology = topology
        self._namespace = config.namespace.encode()

    @property
    def has_servers(self) -> bool:
        return bool(self._topology.peers())

    def servers(self) -> tuple[tuple[str, CircuitState], ...]:
        """Engines of this host are reported as one, in their worst state: their names change with
        each start, and labels of metrics should not."""
        states = super().servers()
        here = [state for node, state in states if node.startswith(HOST_PREFIX)]
        others = [each for each in states if not each[0].startswith(HOST_PREFIX)]
        worst = [("this host", max(here, key=lambda state: state.value))] if here else []
        return (*others, *worst)

    def ask(self, keys: Sequence[bytes], deadline: Deadline) -> list[NodeLookup]:
        """Asks known, connected peers only; does not wait for name resolution."""
        self._servers.refresh()
        return self._send(keys, deadline)

    def _assign(self, keys: Sequence[bytes]) -> dict[Node, list[int]]:
        by_owner: dict[int, list[int]] = {}
        for index, owner in enumerate(map(self._topology.share.owner, keys)):
            by_owner.setdefault(owner, []).append(index)
        return {
            node: list(indices)
            for peer in self._topology.peers()
            for rank, indices in by_owner.items()
            if not self._servers.is_open(node := self._topology.of_rank(peer, rank))
        }

    def _commands(self, keys: Sequence[bytes]) -> bytes:
        asked = (keys[i : i + MAX_ASKED] for i in range(0, len(keys), MAX_ASKED))
        return b"".join(command(b"HOLDS", self._namespace, b"".join(each)) for each in asked)

    def _take(self, node_lookup: NodeLookup, line: bytes) -> None:
        bits, indices = line[1:], node_lookup.indices
        if line[:1] != b"+" or bits.strip(b"01") or len(bits) != min(MAX_ASKED, len(indices)):
            raise WireError(WireFault.OUT_OF_STEP, first_line(line))
        node_lookup.counts.update(zip(indices, map(int, bits.decode()), strict=False))
        del indices[: len(bits)]

    def found(self, keys: Sequence[bytes], node_lookups: Sequence[NodeLookup]) -> list[bool]:
        return [place is not None for place in self.places(keys, node_lookups)]

    def places(
        self, keys: Sequence[bytes], node_lookups: Sequence[NodeLookup]
    ) -> list[Node | None]:
        """Per key a peer's rank that has it; among several, the one that has most of ``keys``."""
        held = {
            node_lookup.node: {i for i, count in node_lookup.counts.items() if count}
            for node_lookup in node_lookups
        }
        places: list[Node | None] = [None] * len(keys)
        for node in sorted(held, key=lambda node: len(held[node])):
            for index in held[node]:
                places[index] = node
        return places

    def find_places(self, keys: Sequence[bytes], limit: Deadline) -> list[Node | None]:
        """Ask and wait; see `places`."""
        node_lookups = self.ask(keys, limit)
        await_answers(node_lookups, limit, enough([self], keys, node_lookups))
        return self.places(keys, node_lookups)


def enough(
    lookups: Sequence[RedisLookup], keys: Sequence[bytes], node_lookups: Sequence[NodeLookup]
) -> Callable[[Sequence[NodeLookup]], bool]:
    """Returns a test to end a wait: every key is found, or all but late peers have answered."""
    first_answer_at: float | None = None

    def is_enough(left: Sequence[NodeLookup]) -> bool:
        nonlocal first_answer_at
        if len(left) == len(node_lookups):
            return False
        now = time.monotonic()
        first_answer_at = now if first_answer_at is None else first_answer_at
        if now - first_answer_at > LATE_SECONDS and all(
            isinstance(node_lookup.asker, PeerLookup) for node_lookup in left
        ):
            return True
        found = (
            lookup.found(keys, [q for q in node_lookups if q.asker is lookup]) for lookup in lookups
        )
        return all(any(each) for each in zip(*found, strict=True))

    return is_enough
