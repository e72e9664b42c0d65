"""Threads that write chunks in the background, each value once; see `write_burst`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import WireError
from lmcache_connector.storage.redis.circuit_breaker import CircuitBreaker
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Counters, WriteEnd
from lmcache_connector.storage.redis.resp import is_redirection
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_names import chunk_tag
from lmcache_connector.storage.redis.write_burst import WriteBurst, WritePlan, WriteRefusedError
from lmcache_connector.storage.redis.write_queue import PendingWrite, WriteQueue

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.25
# Added to a writer's niceness: writes can wait and vLLM cannot. On a CPU that both want, a writer
# gets about a tenth.
_NICENESS = 10
# Chunks whose presence is asked in one round trip.
_TAKE_BYTES = 32 << 20
# Kept for metrics until they are taken; the oldest are forgotten.
_MAX_TIMES = 1024

# Answers by which a server refuses writes here and now. Others, such as READONLY from a demoted
# master, say that this is the wrong connection.
_PAUSING_ERRORS = (b"-OOM ", b"-MISCONF ", b"-NOPERM ", b"-NOREPLICAS ")


class Writer(threading.Thread):
    """Drains the queue over connections of its own.

    ``pause`` opens while the server refuses writes. ``is_spoiled(key)`` tells whether a value of
    that chunk did not verify when it was read, so that it is written again although it exists.
    """

    def __init__(
        self,
        name: str,
        servers: Servers,
        queue: WriteQueue,
        plan: WritePlan,
        counters: Counters,
        pause: CircuitBreaker,
        is_spoiled: Callable[[bytes], bool],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._servers = servers
        self._connections = Connections(servers, servers.config.write_timeout_seconds)
        self._queue = queue
        self._plan = plan
        self._counters = counters
        self._pause = pause
        self._is_spoiled = is_spoiled
        self._stopping = threading.Event()
        self._times: deque[tuple[int, float]] = deque(maxlen=_MAX_TIMES)

    def stop(self) -> None:
        """Give up what is being written within a moment."""
        self._stopping.set()

    def take_times(self) -> list[tuple[int, float]]:
        """Bytes and seconds of each burst that succeeded since the last call."""
        return [self._times.popleft() for _ in range(len(self._times))]

    def run(self) -> None:
        _lower_priority()
        self._connections.tend()
        while not self._stopping.is_set():
            writes = self._queue.take(_TAKE_BYTES, _IDLE_SECONDS)
            if not writes:
                self._connections.tend()
                continue
            self._servers.refresh()
            for node, group in self._by_node(writes).items():
                self._write_group(node, group)
        self._connections.close()

    def _by_node(self, writes: Iterable[PendingWrite]) -> dict[Node | None, list[PendingWrite]]:
        groups: dict[Node | None, list[PendingWrite]] = {}
        for write in writes:
            tag = chunk_tag(self._plan.namespace, write.key)
            groups.setdefault(self._servers.topology.node_of(tag), []).append(write)
        return groups

    def _write_group(self, node: Node | None, writes: Sequence[PendingWrite]) -> None:
        """Write what can be written to ``node``; what is left has failed."""
        left = list(writes)
        if node is not None:
            try:
                self._run_burst(node, left)
            except UnavailableError:
                pass  # it was logged when it began
            except WriteRefusedError as error:
                self._refused(node, error)
            except WireError as error:
                self._connections.drop(node, str(error), blame=error.is_peers_fault)
        for write in left:
            self._finish(write, WriteEnd.FAILED)

    def _run_burst(self, node: Node, left: list[PendingWrite]) -> None:
        """Finished writes leave ``left``."""
        if not self._pause.may_connect():
            raise UnavailableError("writes pause")

        def on_end(write: PendingWrite, end: WriteEnd) -> None:
            left.remove(write)
            self._finish(write, end)

        # As long as bytes move, only `stop` ends a send or an answer.
        patience = Deadline(float("inf"), self._servers.clock, self._stopping.is_set)
        wire = self._connections.get(node)
        burst = WriteBurst(self._plan, wire, patience, self._counters, self._is_spoiled, on_end)
        started = self._servers.clock()
        burst.run(tuple(left))
        if burst.num_bytes:
            self._times.append((burst.num_bytes, self._servers.clock() - started))
        self._connections.succeeded(node)
        self._pause.succeeded()

    def _refused(self, node: Node, error: WriteRefusedError) -> None:
        """A server that has no room, or grants no writes, has not failed: reads go on."""
        pauses = error.reply.startswith(_PAUSING_ERRORS)
        self._connections.drop(node, str(error), blame=not (pauses or is_redirection(error.reply)))
        if pauses and self._pause.failed(at_once=True):
            detail = self._servers.redact(error)
            logger.warning("redis %s refuses writes, they pause: %s", node, detail)

    def _finish(self, write: PendingWrite, end: WriteEnd) -> None:
        self._counters.count_write(end)
        self._queue.finish(write, end.is_stored)


def _lower_priority() -> None:
    """Lower the priority of the calling thread; on other systems it would be the process's."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
    with contextlib.suppress(OSError):  # some sandboxes forbid it: then it is not lowered
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
