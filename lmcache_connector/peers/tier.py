"""Reads chunks from the CPU tiers of peers, with the Redis tier's readers and verification."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lmcache_connector.kv_parts.part import turn
from lmcache_connector.net.deadline import Deadline, never
from lmcache_connector.peers.lookup import PeerLookup
from lmcache_connector.peers.mapped import MappedPeers
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.plans import PeerSource
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig, ValuePlan
from lmcache_connector.storage.redis.connections import Servers
from lmcache_connector.storage.redis.counters import Counters, TierCounts
from lmcache_connector.storage.redis.pending_read import (
    OnArrival,
    arrivals_among,
    ignore_arrivals,
)
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_readers import ReadResult, ValueReaders

logger = logging.getLogger(__name__)

# Time to learn which peer holds which chunk: about 100 round trips of a current network.
_ASK_SECONDS = 0.1
_CONNECT_SHARE = 0.1
_LOOK_SECONDS, _SAMPLE_SECONDS = 0.05, 1.0
_AWAY_SECONDS = 60.0
"""How long this rank stores its own copies of chunks whose owner it could not read."""


class PeerTier:
    """Reads one rank's chunks from peers. Thread-safe. The constructor returns at once; connections
    are made in the background. A peer's failure is a miss, counted by cause. ``maps``: read the
    memory of peers on this host before trying their sockets."""

    def __init__(
        self,
        config: RedisTierConfig,
        geometries: PartGeometries,
        topology: PeerTopology,
        clock: Callable[[], float] = time.monotonic,
        *,
        maps: bool = True,
    ) -> None:
        self.geometries = geometries
        self._share = topology.share
        self._clock = clock
        self._topology = topology
        self._counters = Counters()
        self._asking = threading.Lock()
        self._servers = Servers(config, topology, clock, kind="peer")
        self._lookup = PeerLookup(
            config, [geometries], topology, clock,
            servers=self._servers, connect_share=_CONNECT_SHARE,
        )  # fmt: skip
        self._plan = ValuePlan(config, geometries)
        self._readers = ValueReaders(
            self._servers, self._plan, self._counters, on_spoiled=self._distrust
        )
        self._away_until: dict[int, float] = {}
        self.num_mapped = 0
        """Chunks copied out of the memory of peers, or of other ranks, on this host."""
        self._mapped = MappedPeers(self._plan, topology.socket_path, clock) if maps else None
        self._readers.start()

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        cancelled: Callable[[], bool] = never,
        on_arrival: OnArrival = ignore_arrivals,
        source: PeerSource | None = None,
    ) -> ReadResult:
        """As `RedisTier.read`: leading chunks, each from any peer that has it, or all from
        ``source``."""
        limit = Deadline(deadline, self._clock, cancelled)
        self._servers.refresh()
        nodes: Sequence[Node | Sequence[Node]]
        if source is None:
            nodes = self._nodes(keys, limit)
        elif self._mapped is not None and (node := self._topology.node_on_host(source.engine_id)):
            nodes = [self._topology.of_rank(node, self._share.owner(key)) for key in keys]
        else:
            nodes = [self._nodes_at(source, key) for key in keys]
        return self._read_at(nodes, keys, buffers, limit, on_arrival)

    def read_ranks(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        cancelled: Callable[[], bool] = never,
    ) -> list[bool]:
        """Read chunks owned by other ranks of this engine. Returns per chunk whether it came."""
        limit = Deadline(deadline, self._clock, cancelled)
        owners = list(map(self._share.owner, keys))
        nodes = list(map(self._topology.own_rank, owners))
        result = self._read_at(nodes, keys, buffers, limit)
        if result.cut_off and self._mapped is not None and not cancelled():
            left = dict(zip(owners, nodes, strict=True))
            for rank in {rank for rank, hit in zip(owners, result.hits, strict=True) if hit}:
                del left[rank]
            is_silent, until = self._mapped.is_silent, self._clock() + _AWAY_SECONDS
            away = {rank: until for rank, node in left.items() if is_silent(node)}
            self._away_until = self._away_until | away
        return result.hits

    def is_away(self, rank: int) -> bool:
        """Whether reading that rank of this engine failed less than a minute ago."""
        return self._clock() < self._away_until.get(rank, 0.0)

    def find_ranks(self, sample: Sequence[bytes], is_given_up: threading.Event) -> frozenset[int]:
        """The ranks of this engine that store for others and whose memory is readable, tested with
        their chunks of ``sample``. Ranks start one by one: retries until ``is_given_up`` is set."""
        if self._mapped is None:
            return frozenset()
        left = self._share.others
        while True:
            left = frozenset(rank for rank in left if not self._reads(rank, sample))
            if not left or is_given_up.wait(_LOOK_SECONDS):
                return self._share.others - left

    def _reads(self, rank: int, sample: Sequence[bytes]) -> bool:
        """Uses a separate `MappedPeers`, so that a failure does not back off later reads."""
        node = self._topology.own_rank(rank)
        if (address := self._topology.socket_path(node)) is None or not Path(address).exists():
            return False
        keys = [key for key in sample if rank in self._share.holders(key)]
        buffers = [memoryview(bytearray(self.geometries.of(k).chunk_bytes)) for k in keys]
        limit = Deadline(self._clock() + _SAMPLE_SECONDS, self._clock)
        mapped = MappedPeers(self._plan, self._topology.socket_path, self._clock)
        try:
            return mapped.read(keys, buffers, node, limit) == [True] * len(keys)
        finally:
            mapped.close()

    def _read_at(
        self,
        nodes: Sequence[Node | Sequence[Node]],
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        limit: Deadline,
        on_arrival: OnArrival = ignore_arrivals,
    ) -> ReadResult:
        """``nodes``: of the leading chunks; the others are misses, not failures of a peer."""
        started = self._clock()
        hits = [False] * len(keys)
        if self._mapped is not None:
            hits = self._read_mapped(self._mapped, keys, buffers, nodes, limit)
        left = [i for i in range(len(nodes)) if not hits[i]]
        if not left:
            return ReadResult(hits, self._clock() - started, cut_off=False)
        wanted = [keys[i] for i in left], [buffers[i] for i in left]
        arrivals = arrivals_among(left, len(nodes), on_arrival)
        found = self._readers.read(*wanted, [nodes[i] for i in left], limit, arrivals)
        for index, hit in zip(left, found.hits, strict=True):
            hits[index] = hit
        return ReadResult(hits, self._clock() - started, found.cut_off)

    def _read_mapped(
        self,
        mapped: MappedPeers,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        nodes: Sequence[Node | Sequence[Node]],
        limit: Deadline,
    ) -> list[bool]:
        """Copy chunks of peers, or of other ranks, on this host out of their memory."""
        hits = [False] * len(keys)
        for node in dict.fromkeys(node for node in nodes if isinstance(node, str)):
            at = [i for i, each in enumerate(nodes) if each == node]
            some = [keys[i] for i in at], [buffers[i] for i in at]
            came = mapped.read(*some, node, limit)
            for index, has_come in zip(at, came, strict=True):
                hits[index] = has_come
        self._counters.count_chunks(sum(hits), ())
        self.num_mapped += sum(hits)
        return hits

    def counts(self) -> TierCounts:
        return self._counters.snapshot()

    @property
    def num_fallbacks(self) -> int:
        """Reads of memory on this host that failed, so that the socket was tried."""
        return self._mapped.num_failed if self._mapped is not None else 0

    def close(self, seconds: float) -> bool:
        if self._mapped is not None:
            self._mapped.close()
        is_ended = self._readers.close(seconds)
        with self._asking:
            self._lookup.close()
        return is_ended

    def _nodes_at(self, source: PeerSource, key: bytes) -> Sequence[Node]:
        """Per value of ``key``, the rank of ``source`` to read it from: the same owner as here, or,
        with another tensor-parallel size, one of the ranks that hold the value's head."""
        stripes, topology = self._plan.stripes_of(key), self._topology
        ranks = [self._share.owner(key)] * len(stripes)
        if source.num_ranks != topology.num_ranks:
            num_heads = self.geometries.of(key).num_shards_total
            place = turn(key, max(1, source.num_ranks // num_heads))
            ranks = [each.shard * source.num_ranks // num_heads + place for each in stripes]
        nodes = {r: topology.admit(source.host, source.port + r) for r in dict.fromkeys(ranks)}
        return [nodes[rank] for rank in ranks]

    def _distrust(self, key: bytes, node: Node) -> None:
        logger.warning("The peer %s sent values that fail verification", node)
        self._topology.distrust(node)

    def _nodes(self, keys: Sequence[bytes], limit: Deadline) -> Sequence[Node]:
        """Nodes of the leading chunks, up to the first chunk that no peer has."""
        nodes = [node for key in keys if (node := self._topology.node_of(key)) is not None]
        if len(nodes) == len(keys):  # one peer, no lookup: a missing chunk is a miss of the read
            return () if any(map(self._servers.is_open, set(nodes))) else nodes
        if not limit.wait(lambda seconds: self._asking.acquire(timeout=seconds)):
            return ()
        try:
            soon = replace(limit, at=min(limit.at, self._clock() + _ASK_SECONDS))
            places = self._lookup.find_places(keys, soon)
        finally:
            self._asking.release()
        end = places.index(None) if None in places else len(places)
        return [place for place in places[:end] if place is not None]
