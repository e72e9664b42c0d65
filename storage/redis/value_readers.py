"""Reader threads that share all reads from the servers of one kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import WireFault
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.config import ValuePlan
from lmcache_connector.storage.redis.connections import Servers
from lmcache_connector.storage.redis.counters import Counters, Miss, NotAsked
from lmcache_connector.storage.redis.read_queue import PendingRead, ReadQueue
from lmcache_connector.storage.redis.reader import Reader
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.tier import ReadResult

# Causes of misses that tell of the way to the servers, not of what they hold.
_CONNECTION_FAULTS = frozenset(
    {WireFault.DEADLINE, WireFault.CLOSED, WireFault.STALLED, NotAsked.UNAVAILABLE}
)


class ValueReaders:
    """``num_connections`` threads read values from ``servers``, as ``plan`` has them. Thread-safe.

    ``on_spoiled``: see `Reader`. What was read is counted in ``counters``.
    """

    def __init__(
        self,
        servers: Servers,
        plan: ValuePlan,
        counters: Counters,
        on_spoiled: Callable[[bytes, Node], None],
    ) -> None:
        self._servers = servers
        self._plan = plan
        self._counters = counters
        self._queue = ReadQueue(servers.config.num_connections)
        self.threads = tuple(
            Reader(f"lmc-{servers.kind}-read-{i}", servers, self._queue, on_spoiled)
            for i in range(servers.config.num_connections)
        )

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        find_nodes: Callable[[Deadline], Sequence[Node | Sequence[Node]]],
        limit: Deadline,
    ) -> ReadResult:
        """Read consecutive chunks of one prompt, the leading ones from the nodes that
        ``find_nodes`` names. Blocks; touches no buffer once it has returned.

        ``buffers``: as many writable bytes as the geometry of each key says. Raises ``ValueError``
        for others.
        """
        started = self._servers.clock()
        check_sizes(self._plan.geometries, keys, buffers)
        nodes = find_nodes(limit)
        end = len(nodes)
        read = PendingRead(self._plan, keys[:end], buffers[:end], nodes, limit)
        if nodes and self._queue.add(read):
            read.wait()
        left = len(keys) - end
        hits = read.hits() + [False] * left
        misses = read.misses() + [Miss(NotAsked.UNAVAILABLE)] * left
        self._counters.count_chunks(sum(hits), misses)
        cut_off = not _CONNECTION_FAULTS.isdisjoint(miss.cause for miss in misses)
        return ReadResult(hits, self._servers.clock() - started, cut_off)

    def stop(self) -> None:
        """The threads end soon, and what is being read is a miss."""
        self._queue.close()

    def close(self, seconds: float) -> bool:
        """False if a thread had to be left behind, a daemon that touches no buffer."""
        self.stop()
        until = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)


def check_sizes(
    geometries: PartGeometries, keys: Sequence[bytes], buffers: Sequence[memoryview]
) -> None:
    """Raises ``ValueError`` for a key or a buffer of the wrong size."""
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys, {len(buffers)} buffers")
    for key, buffer in zip(keys, buffers, strict=True):
        if len(key) != CHUNK_KEY_BYTES:
            raise ValueError(f"a chunk key has {CHUNK_KEY_BYTES} bytes, not {len(key)}")
        wanted = geometries.of(key).chunk_bytes
        if buffer.format != "B" or buffer.nbytes != wanted:
            raise ValueError(
                f"a buffer has {wanted} bytes of format B, not {buffer.nbytes} of {buffer.format}"
            )
