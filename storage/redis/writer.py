"""Threads that write chunks in the background, each value once, at least one for each node.

A writer takes a run of its lane's chunks and writes those of one node in a `Burst`, which has a
deadline. So a slow node costs its own chunks only, and one that misses the deadline again and again
gets no writes for a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import WireError, WireFault
from lmcache_connector.storage.redis.burst import Burst, SpoiledChunks, WriteRefusedError
from lmcache_connector.storage.redis.config import ValuePlan
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Counters, WriteEnd
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_names import chunk_tag
from lmcache_connector.storage.redis.write_queue import MAX_LANES, NO_LANE, PendingWrite, WriteQueue

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.25
# Added to a writer's niceness: writes can wait and vLLM cannot. On a CPU that both want, a writer
# gets about a tenth.
_NICENESS = 10
# Taken at once: their presence is asked in one round trip, during which nothing is written. Less
# where the last ones took long.
_MAX_TAKE_BYTES, _TAKE_SECONDS = 32 << 20, 0.5
# Of a node to which nothing has been written yet.
_ASSUMED_BYTES_PER_SECOND = 8 << 20
# A burst may take so many write time-outs, and as long as its bytes take at this speed.
_TIMEOUTS_PER_BURST, _MIN_BYTES_PER_SECOND = 2, 1 << 20
# Kept for metrics until they are taken; the oldest are forgotten.
_MAX_TIMES = 1024
_MIN_SECONDS = 1e-6

# Answers by which a server refuses writes here and now. Others, such as READONLY from a demoted
# master, say that this is the wrong connection.
_PAUSING_ERRORS = (b"-OOM ", b"-MISCONF ", b"-NOPERM ", b"-NOREPLICAS ")


class Lanes:
    """Which lane each node's chunks wait in: its own, unless there are more than ``MAX_LANES``
    nodes. One thread calls `assign`."""

    def __init__(self) -> None:
        self._lanes: dict[Node, int] = {}

    def of(self, node: Node | None) -> int:
        return self._lanes.get(node, NO_LANE) if node is not None else NO_LANE

    def assign(self, nodes: Collection[Node]) -> set[int]:
        """These are the nodes now. The lanes that are in use."""
        lanes = {node: lane for node, lane in self._lanes.items() if node in nodes}
        num_nodes = Counter(lanes.values())
        for node in nodes:
            if node not in lanes:
                lanes[node] = min(range(NO_LANE + 1, MAX_LANES + 1), key=num_nodes.__getitem__)
                num_nodes[lanes[node]] += 1
        self._lanes = lanes
        return set(lanes.values())


@dataclass(frozen=True, slots=True)
class WriteContext:
    """What the writers of a tier share. ``times``: bytes and seconds of each burst that succeeded,
    until somebody takes them."""

    servers: Servers
    queue: WriteQueue
    plan: ValuePlan
    counters: Counters
    spoiled: SpoiledChunks
    lanes: Lanes
    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MAX_TIMES))

    def node_of(self, write: PendingWrite) -> Node | None:
        tag = chunk_tag(self.plan.config.namespace, write.key)
        return self.servers.topology.node_of(tag)

    def lane_of(self, write: PendingWrite) -> int:
        return self.lanes.of(self.node_of(write))

    def finish(self, write: PendingWrite, end: WriteEnd) -> None:
        self.counters.count_write(end)
        self.queue.finish(write, end.is_stored)

    def deadline(self, seconds: float, cancelled: Callable[[], bool]) -> Deadline:
        """From now."""
        return Deadline(self.servers.clock() + seconds, self.servers.clock, cancelled)


class Writers(threading.Thread):
    """Sees to it that each lane has a writer, and that there are ``num_writers`` in all. What was
    put while nothing was known of the servers waits here."""

    def __init__(self, context: WriteContext, num_writers: int) -> None:
        super().__init__(name="lmc-redis-writers", daemon=True)
        self._context = context
        self._num_writers = num_writers
        self._stopping = threading.Event()
        self._writers: list[Writer] = []

    def stop(self) -> None:
        """Give up what is being written within a moment."""
        self._stopping.set()

    def threads(self) -> list[threading.Thread]:
        """All that is left to end once this one has ended."""
        return list(self._writers)

    def run(self) -> None:
        context, timeout = self._context, 0.0
        seconds = context.servers.config.connect_timeout_seconds
        while not self._stopping.is_set():
            strays = context.queue.take(_MAX_TAKE_BYTES, timeout)
            timeout = _IDLE_SECONDS
            try:
                wait = context.deadline(seconds, self._stopping.is_set) if strays else None
                context.servers.refresh(wait)
                self._start_writers()
            except Exception:  # whatever it is, it may go better the next time
                logger.exception("starting writers to redis failed")
            for write in strays:
                lane = context.lane_of(write)
                if lane == NO_LANE or not context.queue.move(write, lane):
                    context.finish(write, WriteEnd.FAILED)

    def _start_writers(self) -> None:
        lanes = self._context.lanes.assign(self._context.servers.topology.nodes())
        running = Counter(writer.lane for writer in self._writers)
        for lane in lanes:
            for _ in range(running[lane], max(1, self._num_writers // len(lanes))):
                writer = Writer(len(self._writers), lane, self._context, self._stopping)
                with contextlib.suppress(RuntimeError):  # no thread to spare: again in a moment
                    writer.start()
                    self._writers.append(writer)


class Writer(threading.Thread):
    """Drains a lane over connections of its own until ``stopping`` is set."""

    def __init__(
        self, number: int, lane: int, context: WriteContext, stopping: threading.Event
    ) -> None:
        super().__init__(name=f"lmc-redis-write-{number}", daemon=True)
        self.lane = lane
        self._context = context
        self._stopping = stopping
        self._servers = context.servers
        self._connections = Connections(self._servers, self._servers.config.write_timeout_seconds)
        self._bytes_per_second = float(_ASSUMED_BYTES_PER_SECOND)

    def run(self) -> None:
        _lower_priority()
        context, timeout = self._context, 0.0  # connect before there is anything to write
        while not self._stopping.is_set():
            size = min(int(_TAKE_SECONDS * self._bytes_per_second), _MAX_TAKE_BYTES)
            taken = context.queue.take(size, timeout, self.lane)
            timeout = _IDLE_SECONDS
            left = {write.key: write for write in taken}
            try:
                if left:
                    self._write(left)
                else:
                    self._connections.tend(self._is_mine)
            except Exception:  # whatever it is, the next writes may fare better
                logger.exception("writing to redis failed")
                self._connections.close()
            for write in left.values():
                context.finish(write, WriteEnd.FAILED)
        self._connections.close()

    def _is_mine(self, node: Node) -> bool:
        return self._context.lanes.of(node) == self.lane

    def _write(self, left: dict[bytes, PendingWrite]) -> None:
        """Write what can be written. Finished writes, and those of other lanes, leave ``left``."""
        self._servers.refresh()
        groups: dict[Node, list[PendingWrite]] = {}
        for write in list(left.values()):
            node = self._context.node_of(write)
            if node is not None and self._is_mine(node):
                groups.setdefault(node, []).append(write)
            elif node is not None and self._context.queue.move(write, self._context.lanes.of(node)):
                del left[write.key]
        for node in groups:
            try:
                self._run_burst(node, groups[node], left)
            except UnavailableError:
                pass  # it was logged when it began
            except WriteRefusedError as error:
                # A server that has no room, or grants no writes, has not failed: reads go on.
                pauses = error.reply.startswith(_PAUSING_ERRORS)
                self._connections.drop(node, str(error), blame=not pauses)
                if pauses:
                    self._pause(node, f"refuses writes, they pause: {error}", at_once=True)
            except WireError as error:
                is_slow = error.fault is WireFault.DEADLINE
                blame = error.is_peers_fault and not is_slow
                self._connections.drop(node, str(error), blame=blame)
                self._bytes_per_second = 0.0
                if is_slow:  # its reads may be quick
                    self._pause(node, "takes writes too slowly, they pause", at_once=False)

    def _run_burst(
        self, node: Node, writes: Sequence[PendingWrite], left: dict[bytes, PendingWrite]
    ) -> None:
        context, servers = self._context, self._servers
        pause = servers.pause(node)
        if not pause.may_connect():
            raise UnavailableError("writes pause")

        def on_end(write: PendingWrite, end: WriteEnd) -> None:
            del left[write.key]
            context.finish(write, end)

        is_over = self._stopping.is_set
        until = context.deadline(servers.config.connect_timeout_seconds, is_over)
        wire = self._connections.get(node, until)
        num_bytes = sum(len(write.buffer) for write in writes)
        seconds = _TIMEOUTS_PER_BURST * servers.config.write_timeout_seconds
        deadline = context.deadline(seconds + num_bytes / _MIN_BYTES_PER_SECOND, is_over)
        burst = Burst(context.plan, wire, deadline, context.counters, context.spoiled, on_end)
        started = servers.clock()
        burst.run(writes)
        if burst.num_bytes:
            seconds = servers.clock() - started
            context.times.append((burst.num_bytes, seconds))
            self._bytes_per_second = burst.num_bytes / max(seconds, _MIN_SECONDS)
        else:
            self._bytes_per_second = max(self._bytes_per_second, _ASSUMED_BYTES_PER_SECOND)
        if burst.was_redirected:
            servers.topology.redirected(node)
        self._connections.succeeded(node)
        pause.succeeded()

    def _pause(self, node: Node, why: str, *, at_once: bool) -> None:
        if self._servers.pause(node).failed(at_once=at_once):
            logger.warning("redis %s %s", node, self._servers.redact(why))


def _lower_priority() -> None:
    """Lower the priority of the calling thread; on other systems it would be the process's."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
    with contextlib.suppress(OSError):  # some sandboxes forbid it: then it is not lowered
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
