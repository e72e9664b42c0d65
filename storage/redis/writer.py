"""Threads that write chunks in the background, each value once.

A writer takes a run of chunks and writes those of one node in a `Burst`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import WireError
from lmcache_connector.storage.redis.burst import Burst, Compress, WriteRefusedError, WriterNotes
from lmcache_connector.storage.redis.config import ValuePlan
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Counters, WriteEnd
from lmcache_connector.storage.redis.healer import Healer
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_names import chunk_tag
from lmcache_connector.storage.redis.write_queue import PendingWrite, WriteQueue

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.25
# Added to a writer's niceness: writes can wait and vLLM cannot. On a CPU that both want, a writer
# gets about a tenth.
_NICENESS = 10
# Taken at once: their presence is asked in one round trip, during which nothing is written. More
# where the last ones took next to no time, but then for no longer: others' claims shall not expire
# meanwhile, nor forward passes share their cores.
_MIN_TAKE_BYTES, _MAX_TAKE_BYTES = 32 << 20, 256 << 20
_TAKE_SECONDS = 0.05
# Kept for metrics until they are taken; the oldest are forgotten.
_MAX_TIMES = 1024
_MIN_SECONDS = 1e-6

# Answers by which a server refuses writes here and now. Others, such as READONLY from a demoted
# master, say that this is the wrong connection.
_PAUSING_ERRORS = (b"-OOM ", b"-MISCONF ", b"-NOPERM ", b"-NOREPLICAS ")


class Writer(threading.Thread):
    """Drains the queue over connections of its own, and lets ``healer`` work in between."""

    def __init__(
        self,
        name: str,
        servers: Servers,
        queue: WriteQueue,
        plan: ValuePlan,
        counters: Counters,
        notes: WriterNotes,
        compress: Compress,
        healer: Healer,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._servers = servers
        self._connections = Connections(servers, servers.config.write_timeout_seconds)
        self._queue = queue
        self._plan = plan
        self._counters = counters
        self._notes = notes
        self._compress = compress
        self._healer = healer
        self._stopping = threading.Event()
        self._times: deque[tuple[int, float]] = deque(maxlen=_MAX_TIMES)
        self._bytes_per_second = 0.0

    def stop(self) -> None:
        """Give up what is being written within a moment."""
        self._stopping.set()

    def take_times(self) -> list[tuple[int, float]]:
        """Bytes written and seconds of each burst that succeeded since the last call."""
        return [self._times.popleft() for _ in range(len(self._times))]

    def run(self) -> None:
        _lower_priority()
        timeout = 0.0  # connect before there is anything to write
        while not self._stopping.is_set():
            writes = self._queue.take(take_bytes(self._bytes_per_second), timeout)
            timeout = _IDLE_SECONDS
            left = list(writes)
            try:
                if writes:
                    self._write(left)
                else:
                    self._connections.tend()
                self._healer.heal()
            except Exception:  # whatever it is, the next writes may fare better
                logger.exception("writing to redis failed")
                self._connections.close()
            for write in left:
                self._finish(write, WriteEnd.FAILED)
        self._connections.close()

    def _write(self, left: list[PendingWrite]) -> None:
        """Write what can be written. Finished writes leave ``left``."""
        self._servers.refresh(self._connect_deadline())
        groups: dict[Node, list[PendingWrite]] = {}
        for write in left:
            node = self._servers.topology.node_of(chunk_tag(self._plan.config.namespace, write.key))
            if node is not None:
                groups.setdefault(node, []).append(write)
        for node in sorted(groups, key=self._connections.has, reverse=True):
            try:
                self._run_burst(node, groups[node], left)
            except UnavailableError:
                pass  # it was logged when it began
            except WriteRefusedError as error:
                self._refused(node, error)
            except WireError as error:
                self._connections.drop(node, str(error), blame=error.is_peers_fault)

    def _run_burst(
        self, node: Node, writes: Sequence[PendingWrite], left: list[PendingWrite]
    ) -> None:
        pause = self._servers.pause(node)
        if not pause.may_connect():
            raise UnavailableError("writes pause")

        def on_end(write: PendingWrite, end: WriteEnd) -> None:
            left.remove(write)
            self._finish(write, end)

        # As long as bytes move, only `stop` ends a send; an answer has the wire's time-out.
        deadline = Deadline(float("inf"), self._servers.clock, self._stopping.is_set)
        wire = self._connections.get(node, self._connect_deadline())
        burst = Burst(
            self._plan, wire, deadline, self._counters, self._notes, self._compress, on_end
        )
        started = self._servers.clock()
        burst.run(writes)
        if burst.num_bytes:
            seconds = self._servers.clock() - started
            self._times.append((burst.num_bytes, seconds))
            self._bytes_per_second = burst.num_bytes / max(seconds, _MIN_SECONDS)
        if burst.was_redirected:
            self._servers.topology.redirected(node)
        self._connections.succeeded(node)
        pause.succeeded()

    def _connect_deadline(self) -> Deadline:
        clock = self._servers.clock
        until = clock() + self._servers.config.connect_timeout_seconds
        return Deadline(until, clock, self._stopping.is_set)

    def _refused(self, node: Node, error: WriteRefusedError) -> None:
        """A server that has no room, or grants no writes, has not failed: reads go on."""
        pauses = error.reply.startswith(_PAUSING_ERRORS)
        self._connections.drop(node, str(error), blame=not pauses)
        if pauses and self._servers.pause(node).failed(at_once=True):
            detail = self._servers.redact(error)
            logger.warning("redis %s refuses writes, they pause: %s", node, detail)

    def _finish(self, write: PendingWrite, end: WriteEnd) -> None:
        self._counters.count_write(end)
        self._queue.finish(write, end.is_stored)


def take_bytes(bytes_per_second: float) -> int:
    """How much to take from the queue at once, by the speed of the last burst."""
    wanted = min(_TAKE_SECONDS * bytes_per_second, _MAX_TAKE_BYTES)
    return max(_MIN_TAKE_BYTES, int(wanted))


def _lower_priority() -> None:
    """Lower the priority of the calling thread; on other systems it would be the process's."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
    with contextlib.suppress(OSError):  # some sandboxes forbid it: then it is not lowered
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
