"""Chunks in the CPU tiers of peers, read as those in Redis are: by the same threads' code, into
the same buffers, with the same checks of every byte."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lmcache_connector.net.deadline import Deadline, never
from lmcache_connector.peers.lookup import PeerLookup
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.plans import PeerSource
from lmcache_connector.storage.chunk_codec import Sealer
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.connections import Servers
from lmcache_connector.storage.redis.counters import Counters, TierCounts
from lmcache_connector.storage.redis.read_queue import ValueRequest
from lmcache_connector.storage.redis.tier import plan_values
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_readers import ValueReaders
from lmcache_connector.storage.tier import ReadResult

logger = logging.getLogger(__name__)

# To hear which peer holds what: on a network of today an answer takes a hundredth of it.
_ASK_SECONDS = 0.1
_CONNECT_SHARE = 0.1


class PeerTier:
    """One rank's chunks in the memory of others. Thread-safe. Returns at once; connections are made
    in the background. A peer's failure is a miss, counted by cause."""

    def __init__(
        self,
        config: RedisTierConfig,
        geometries: PartGeometries,
        topology: PeerTopology,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.geometries = geometries
        self._clock = clock
        self._topology = topology
        self._counters = Counters()
        self._asking = threading.Lock()
        self._lookup = PeerLookup(
            config, [geometries], topology, clock, connect_share=_CONNECT_SHARE
        )
        self._servers = Servers(config, topology, clock, random.random, kind="peer")
        shards = tuple(part.shards for part in geometries.parts)
        self._plan = plan_values(config, geometries, shards, Sealer(config.hash_key))
        self._readers = ValueReaders(
            self._servers, self._plan, self._counters, on_spoiled=self._distrust
        )
        self._readers.start()

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        cancelled: Callable[[], bool] = never,
        source: PeerSource | None = None,
    ) -> ReadResult:
        """As in `ReadableTier`: leading chunks, as far as each is with some peer, or those of
        ``source``."""
        limit = Deadline(deadline, self._clock, cancelled)
        if source is not None:
            nodes = [self._nodes_at(source, key) for key in keys]
            return self._readers.read(keys, buffers, lambda until: nodes, limit)
        return self._readers.read(keys, buffers, lambda until: self._nodes(keys, until), limit)

    def servers(self) -> tuple[tuple[str, CircuitState], ...]:
        """Peers read from so far, and the states of their circuits."""
        return self._servers.states()

    def counts(self) -> TierCounts:
        """Since the start."""
        return self._counters.snapshot()

    def close(self, seconds: float) -> bool:
        is_ended = self._readers.close(seconds)
        with self._asking:
            self._lookup.close()
        return is_ended

    def _nodes_at(self, source: PeerSource, key: bytes) -> Sequence[Node]:
        """The rank of ``source`` that has each of the values of ``key``: the same as here, or, in
        another number of tensor-parallel ranks, the first that holds the head."""
        values, topology = self._plan.of(key), self._topology
        ranks = [topology.port_offset] * len(values.stripes)
        if source.num_ranks != topology.num_ranks:
            num_heads = values.geometry.num_shards_total
            ranks = [stripe.shard * source.num_ranks // num_heads for stripe in values.stripes]
        nodes = {r: topology.admit(source.host, source.port + r) for r in dict.fromkeys(ranks)}
        return [nodes[rank] for rank in ranks]

    def _distrust(self, request: ValueRequest, node: Node) -> None:
        logger.warning("peer %s: sends values that are not what their names say", node)
        self._topology.distrust(node)

    def _nodes(self, keys: Sequence[bytes], limit: Deadline) -> Sequence[Node]:
        """Where the leading chunks are, up to the first that nobody has."""
        self._servers.refresh()
        only = self._topology.node_of(b"")
        if only is not None:  # what it lacks, the read will show
            return () if self._servers.is_open(only) else [only] * len(keys)
        soon = replace(limit, at=min(limit.at, self._clock() + _ASK_SECONDS))
        with self._asking:
            places = self._lookup.find_places(keys, soon)
        end = places.index(None) if None in places else len(places)
        return [place for place in places[:end] if place is not None]
