"""Threads that write chunks in the background: at least one per lane of the write queue.

A writer takes chunks from its lane and writes those of each node in a `Burst` with a deadline. A
slow node delays only its lane's chunks; after repeated misses of the deadline, its writes pause.
Until nodes are known, all chunks wait in one lane; its writer moves them to the lanes of their
nodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import WireError, WireFault
from lmcache_connector.storage.redis.burst import Burst, SpoiledChunks, WriteRefusedError
from lmcache_connector.storage.redis.config import ValuePlan
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Counters, WriteEnd
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_names import chunk_tag
from lmcache_connector.storage.redis.write_queue import MAX_LANES, PendingWrite, WriteQueue

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.25
# Added to the engine's niceness: writes can wait, vLLM cannot. At full CPU load a writer gets about
# a tenth.
_NICENESS = 10
# Limits of one take from the queue: bytes, and seconds at the last burst's speed. High, because
# nothing is written during the round trip that asks which values are stored already.
_MAX_TAKE_BYTES, _TAKE_SECONDS = 128 << 20, 0.2
# Until a first burst has been timed.
_ASSUMED_BYTES_PER_SECOND = 8 << 20
# A burst may take two write time-outs, plus the time of its bytes at this speed.
_TIMEOUTS_PER_BURST, _MIN_BYTES_PER_SECOND = 2, 1 << 20
# Burst times kept for metrics.
_MAX_TIMES = 1024
_MIN_SECONDS = 1e-6

# Errors by which a server refuses all writes for now; it may serve reads. READONLY comes from a
# demoted master, CLUSTERDOWN from a node that cannot see most of its cluster, or lacks a slot's
# owner. A new connection is made after each, since the address may be another server's.
_PAUSING_CODES = b"OOM MISCONF NOPERM NOREPLICAS READONLY CLUSTERDOWN"
_PAUSING_ERRORS = tuple(b"-%b " % code for code in _PAUSING_CODES.split())


@lru_cache(maxsize=4)
def _lanes(nodes: tuple[Node, ...]) -> Mapping[Node, int]:
    return {node: i % MAX_LANES for i, node in enumerate(sorted(nodes))}


class Writers:
    """Up to ``num_writers`` writers, but at least one per lane. ``times``: bytes and seconds of
    each successful burst that stored any."""

    def __init__(
        self,
        servers: Servers,
        queue: WriteQueue,
        plan: ValuePlan,
        counters: Counters,
        spoiled: SpoiledChunks,
        num_writers: int,
    ) -> None:
        self.servers = servers
        self.queue = queue
        self.plan = plan
        self.counters = counters
        self.spoiled = spoiled
        self.times: deque[tuple[int, float]] = deque(maxlen=_MAX_TIMES)
        self.stopping = threading.Event()
        """When set, writes in progress are soon given up."""
        self._num_writers = num_writers
        self._lock = threading.Lock()
        self._writers: list[list[Writer]] = []  # by lane

    def threads(self) -> list[threading.Thread]:
        """The writers; complete once `stopping` is set."""
        with self._lock:
            return [writer for writers in self._writers for writer in writers]

    def node_of(self, key: bytes) -> Node | None:
        return self.servers.topology.node_of(chunk_tag(self.plan.config.namespace, key))

    def lane_of(self, node: Node | None) -> int:
        """The lane of a node's chunks, or of chunks whose node is not known yet; with more than
        ``MAX_LANES`` nodes, some share a lane."""
        return _lanes(self.servers.topology.nodes()).get(node, 0) if node else 0

    def finish(self, write: PendingWrite, end: WriteEnd) -> None:
        self.counters.count_write(end)
        self.queue.finish(write, end.is_stored)

    def deadline(self, seconds: float) -> Deadline:
        """From now; cut short by `stopping`."""
        clock = self.servers.clock
        return Deadline(clock() + seconds, clock, self.stopping.is_set)

    def start_missing(self) -> None:
        """Start writers in lanes that have too few, as after nodes have become known."""
        num_lanes = min(max(1, len(self.servers.topology.nodes())), MAX_LANES)
        with self._lock:
            self._writers += ([] for _ in range(len(self._writers), num_lanes))
            for lane, writers in enumerate(self._writers[:num_lanes]):
                while len(writers) < max(1, self._num_writers // num_lanes):
                    if self.stopping.is_set():
                        return
                    writer = Writer(f"{lane}-{len(writers)}", lane, self)
                    try:
                        writer.start()
                    except RuntimeError:  # out of threads: the others retry
                        if not any(self._writers):
                            raise
                        return
                    writers.append(writer)


class Writer(threading.Thread):
    """Drains one lane with its own connections, until ``writers.stopping``."""

    def __init__(self, number: str, lane: int, writers: Writers) -> None:
        super().__init__(name=f"lmc-redis-write-{number}", daemon=True)
        self.lane = lane
        self._all = writers
        self._servers = writers.servers
        self._connections = Connections(self._servers, self._servers.config.write_timeout_seconds)
        self._bytes_per_second = float(_ASSUMED_BYTES_PER_SECOND)

    def run(self) -> None:
        _lower_priority()
        timeout = 0.0  # connect before the first write
        while not self._all.stopping.is_set():
            size = min(int(_TAKE_SECONDS * self._bytes_per_second), _MAX_TAKE_BYTES)
            taken = self._all.queue.take(size, timeout, self.lane)
            timeout = _IDLE_SECONDS
            left = {write.key: write for write in taken}
            try:
                self._all.start_missing()
                if left:
                    self._write(left)
                else:
                    self._connections.maintain(self._is_mine)
            except Exception:  # keep serving writes
                logger.exception("writing to redis failed")
                self._connections.close()
            for write in left.values():
                self._all.finish(write, WriteEnd.FAILED)
        self._connections.close()

    def _is_mine(self, node: Node) -> bool:
        return self._all.lane_of(node) == self.lane

    def _write(self, left: dict[bytes, PendingWrite]) -> None:
        """Write what can be written. Finished and moved writes are removed from ``left``."""
        self._servers.refresh(self._all.deadline(self._servers.config.connect_timeout_seconds))
        self._all.start_missing()
        groups: dict[Node, list[PendingWrite]] = {}
        for write in list(left.values()):
            node = self._all.node_of(write.key)
            if node is not None and self._is_mine(node):
                groups.setdefault(node, []).append(write)
            elif node is not None and self._all.queue.move(write, self._all.lane_of(node)):
                del left[write.key]  # the writer of its node's lane finishes it
        for node in groups:
            try:
                self._run_burst(node, groups[node], left)
            except UnavailableError:
                pass  # logged at the start of the episode
            except WriteRefusedError as error:
                pauses = error.reply.startswith(_PAUSING_ERRORS)
                self._connections.drop(node, str(error), blame=not pauses)
                if pauses:
                    self._pause(node, f"refuses writes; writing is paused: {error}", at_once=True)
            except WireError as error:
                is_slow = error.fault is WireFault.DEADLINE
                blame = error.is_peers_fault and not is_slow
                self._connections.drop(node, str(error), blame=blame)
                self._bytes_per_second = 0.0
                if is_slow:  # reads may still be fast
                    self._pause(node, "accepts writes too slowly; writing is paused", at_once=False)

    def _run_burst(
        self, node: Node, writes: Sequence[PendingWrite], left: dict[bytes, PendingWrite]
    ) -> None:
        writers, servers = self._all, self._servers
        pause = servers.pause(node)
        if not pause.may_connect():
            raise UnavailableError("writes pause")

        def on_end(write: PendingWrite, end: WriteEnd) -> None:
            del left[write.key]
            writers.finish(write, end)

        until = writers.deadline(servers.config.connect_timeout_seconds)
        wire = self._connections.get(node, until)
        num_bytes = sum(len(write.buffer) for write in writes)
        seconds = _TIMEOUTS_PER_BURST * servers.config.write_timeout_seconds
        deadline = writers.deadline(seconds + num_bytes / _MIN_BYTES_PER_SECOND)
        burst = Burst(writers.plan, wire, deadline, writers.counters, writers.spoiled, on_end)
        started = servers.clock()
        burst.run(writes)
        if burst.num_bytes:
            seconds = servers.clock() - started
            writers.times.append((burst.num_bytes, seconds))
            self._bytes_per_second = burst.num_bytes / max(seconds, _MIN_SECONDS)
            pause.succeeded()
        else:  # a server that refuses writes still says which values it has
            pause.undecided()
            self._bytes_per_second = max(self._bytes_per_second, _ASSUMED_BYTES_PER_SECOND)
        if burst.was_redirected:
            servers.topology.redirected(node)
        self._connections.succeeded(node)

    def _pause(self, node: Node, why: str, *, at_once: bool) -> None:
        if self._servers.pause(node).failed(at_once=at_once):
            logger.warning("redis %s %s", node, self._servers.redact(why))


def _lower_priority() -> None:
    """Lower the calling thread's priority, on Linux; elsewhere it would be the whole process's."""
    if sys.platform != "linux":
        return
    # From the main thread's niceness: writers start others, which inherit a lowered priority.
    niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICENESS
    with contextlib.suppress(OSError):  # forbidden in some sandboxes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
