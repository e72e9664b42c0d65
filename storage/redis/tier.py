"""Chunks in Redis: the tier that instances share.

Threads, until `RedisTier.close`:

- ``num_connections`` readers share every read (`value_readers`);
- as many writers, but at most one per two cores and at least one per lane, drain the write queue
  (`writer`), which has a lane for each of up to 32 nodes.

No method raises because of a server: each failure is a miss or a failed write, counted (misses by
cause), and logged once per episode.
"""

from __future__ import annotations

import logging
import os
import random as random_module
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_connector.net.deadline import Deadline, never
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.burst import SpoiledChunks
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.config import RedisTierConfig, ValuePlan
from lmcache_connector.storage.redis.connections import Servers, warn_if_unbounded
from lmcache_connector.storage.redis.counters import Counters, TierCounts, WriteEnd
from lmcache_connector.storage.redis.pending_read import OnArrival, ignore_arrivals
from lmcache_connector.storage.redis.topology import Node, make_topology
from lmcache_connector.storage.redis.value_readers import ReadResult, ValueReaders, check_sizes
from lmcache_connector.storage.redis.write_queue import OnDone, PendingWrite, WriteQueue
from lmcache_connector.storage.redis.writer import Writers

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
# For threads to notice the end, however short the time given to `close`.
_CLOSE_GRACE_SECONDS = 0.5
# Spoiled values in shorter intervals are one episode, and logged once.
_EPISODE_SECONDS = 60.0


@dataclass(frozen=True)
class RedisTierStats:
    """``counts`` since the start, the rest as of now. ``servers``: node and circuit state."""

    counts: TierCounts
    queued_bytes: int
    servers: tuple[tuple[str, CircuitState], ...]
    writes_paused: bool


class RedisTier:
    """One rank's chunks in Redis. Thread-safe.

    ``is_writer(key)``: whether this rank writes the values of ``key``; of the ranks that hold the
    same values, one does. ``clock`` returns seconds, ``random`` numbers in [0, 1).
    """

    def __init__(
        self,
        config: RedisTierConfig,
        geometries: PartGeometries,
        is_writer: Callable[[bytes], bool] = lambda key: True,
        *,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        """Returns at once; connections are made in the background."""
        self._config = config
        self.geometries = geometries
        self._clock = clock
        self._counters = Counters()
        self._topology = make_topology(config, clock)
        self._servers = Servers(config, self._topology, clock, random, greet=warn_if_unbounded)
        self._writes = WriteQueue(config.write_queue_bytes)
        self._is_writer = is_writer
        plan = ValuePlan(config, geometries)
        self._spoiled = SpoiledChunks()
        self._spoiled_at = float("-inf")
        self._readers = ValueReaders(self._servers, plan, self._counters, self._found_spoiled)
        self._writers = Writers(
            self._servers, self._writes, plan, self._counters, self._spoiled,
            _num_writers(config.num_connections),
        )  # fmt: skip
        self._readers.start()
        self._writers.start_missing()

    def __repr__(self) -> str:
        return f"RedisTier({self._config.address}, namespace={self._config.namespace!r})"

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        cancelled: Callable[[], bool] = never,
        on_arrival: OnArrival = ignore_arrivals,
    ) -> ReadResult:
        """Read consecutive chunks of one prompt. Blocks; touches no buffer after it has returned.

        ``keys``: ``CHUNK_KEY_BYTES`` bytes each. ``buffers``: writable, ``chunk_bytes`` of each
        key's geometry; those of misses may hold garbage afterwards. ``deadline``: in seconds of the
        tier's clock; the call returns soon after it, or after ``cancelled()``. ``on_arrival`` is
        called meanwhile.

        Chunks behind the first miss are not worth reading, and may be hits or misses. Raises
        ``ValueError`` for keys or buffers of the wrong size.
        """
        limit = Deadline(deadline, self._clock, cancelled)
        return self._readers.read(keys, buffers, self._nodes(keys, limit), limit, on_arrival)

    def put(self, key: bytes, buffer: memoryview, on_done: OnDone, order: int = 0) -> bool:
        """Queue a chunk to be written. Never blocks. False if dropped: no room, closed, or paused.

        ``buffer``: ``chunk_bytes`` of the key's geometry; must not change before ``on_done``, which
        is called exactly once, from any thread, maybe before `put` returns: with True if all values
        that this rank writes are known to be in Redis. ``order``: the chunk's index in its
        prompt; a full queue drops the deepest chunks first. Overwrites only values of the wrong
        length, and chunks that a read found spoiled. Raises ``ValueError`` for a wrong size.
        """
        check_sizes(self.geometries, [key], [buffer])
        write = PendingWrite(key, buffer, order, [on_done])
        if not self._is_writer(key):
            write.finish(True)
            return True
        node = self._writers.node_of(key)
        if node is not None and self._servers.is_paused(node):
            dropped = [write]
        else:
            dropped = self._writes.offer(write, self._writers.lane_of(node))
        self._drop(dropped)
        return write not in dropped

    def flush(self, timeout: float) -> bool:
        """False if the write queue is not empty within ``timeout`` seconds."""
        return self._writes.wait_empty(timeout)

    def close(self, seconds: float) -> bool:
        """Write for up to ``seconds``, drop the rest, end all threads. Idempotent. False if a
        thread is still running, for instance in a read until its deadline; it is a daemon, and
        touches only buffers of reads and writes that have not ended."""
        until = time.monotonic() + seconds
        self._writes.wait_empty(seconds)
        self._drop(self._writes.close())
        self._writers.stopping.set()
        self._readers.stop()
        until = max(until, time.monotonic() + _CLOSE_GRACE_SECONDS)
        threads = (*self._readers.threads, *self._writers.threads())
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def has_room(self, key: bytes, most_bytes: int) -> bool:
        """Whether `put` would queue the chunk and drop none: its node answers and accepts writes,
        at most ``most_bytes`` wait for it, and the queue has room."""
        node = self._writers.node_of(key)
        if node is not None and (self._servers.is_open(node) or self._servers.is_paused(node)):
            return False
        lane = self._writers.lane_of(node)
        num_bytes = self.geometries.of(key).chunk_bytes
        return self._writes.lane_bytes(lane) <= most_bytes and self._writes.room_bytes >= num_bytes

    def stats(self) -> RedisTierStats:
        return RedisTierStats(
            counts=self._counters.snapshot(),
            queued_bytes=self._writes.num_bytes,
            servers=self._servers.states(),
            writes_paused=self._servers.any_paused(),
        )

    def take_write_times(self) -> list[tuple[int, float]]:
        """Bytes and seconds of each burst that stored bytes since the last call, for metrics."""
        times = self._writers.times
        return [times.popleft() for _ in range(len(times))]

    def _found_spoiled(self, key: bytes, node: Node) -> None:
        self._spoiled.add(key)
        if self._clock() - self._spoiled_at > _EPISODE_SECONDS:
            logger.warning(
                "redis %s: a value failed verification; `lmcache-connector verify` checks all", node
            )
        self._spoiled_at = self._clock()

    def _nodes(self, keys: Sequence[bytes], limit: Deadline) -> list[Node]:
        """Nodes of the leading chunks, up to the first whose node is unknown or has an open
        circuit. Right after the start, waits until nodes are known."""
        while not self._topology.nodes() and (left := limit.remaining()) > 0.0:
            time.sleep(min(_POLL_SECONDS, left))
        nodes: list[Node] = []
        for key in keys:
            node = self._writers.node_of(key)
            if node is None or self._servers.is_open(node):
                break
            nodes.append(node)
        return nodes

    def _drop(self, writes: Sequence[PendingWrite]) -> None:
        for write in writes:
            self._counters.count_write(WriteEnd.QUEUE_FULL)
            write.finish(False)


def _num_writers(num_connections: int) -> int:
    """A writer mostly computes and copies: on two cores, a second one would compete with the engine
    or a local server."""
    return max(1, min(num_connections, (os.cpu_count() or 1) // 2))
