"""Reader threads that share all reads from servers of one kind, each with its own connections."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import WireError, WireFault
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.client.resp import ReplyFault, is_redirection
from lmcache_connector.storage.redis.config import ValuePlan
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Counters, Miss, NotAsked
from lmcache_connector.storage.redis.pending_read import (
    OnArrival,
    PendingRead,
    ignore_arrivals,
)
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_stream import BadReplyError, SingleReplies, ValueStream

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.25
# Fraction of a read's time that may be spent connecting.
_CONNECT_SHARE = 0.5
# Bad replies that count against the server; others are due to what was stored.
_SERVER_FAULTS = frozenset({ReplyFault.ERROR_REPLY, WireFault.OUT_OF_STEP})
_FORBIDDEN = b"-NOPERM "
# Misses due to the connection rather than to the server's content.
_CONNECTION_FAULTS = frozenset(
    {WireFault.DEADLINE, WireFault.CLOSED, WireFault.STALLED, NotAsked.UNAVAILABLE}
)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """``hits[i]``: chunk i was read and verified. ``seconds``: duration of the read. ``cut_off``:
    chunks are missing because a server was too slow or unreachable, or a connection broke.
    ``lacks_next``: a server has answered that it does not have the first missing chunk."""

    hits: list[bool]
    seconds: float
    cut_off: bool
    lacks_next: bool = False


class ValueReaders:
    """``num_connections`` threads that read values from ``servers``. Thread-safe.

    With several nodes and readers, at most all but one serve the same node: a silent node blocks
    the readers that wait for it, and other nodes' chunks must still be read. ``on_spoiled``: see
    `ValueStream`. Reads are counted in ``counters``.
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
        self._reads: list[PendingRead] = []  # with work left, oldest first
        self._readers: Counter[Node] = Counter()  # readers at each node
        self._changed = threading.Condition()
        self.closed = False
        self.threads = tuple(
            Reader(f"lmc-{servers.kind}-read-{i}", servers, self, on_spoiled)
            for i in range(servers.config.num_connections)
        )

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        nodes: Sequence[Node | Sequence[Node]],
        limit: Deadline,
        on_arrival: OnArrival = ignore_arrivals,
    ) -> ReadResult:
        """Read consecutive chunks of one prompt; ``nodes``: of the leading ones. Blocks; touches no
        buffer after it has returned. Calls ``on_arrival`` meanwhile.

        ``buffers``: writable, of the size that the geometry of each key gives; else ``ValueError``.
        """
        started = self._servers.clock()
        check_sizes(self._plan.geometries, keys, buffers)
        end = len(nodes)
        until = replace(limit, cancelled=lambda: self.closed or limit.cancelled())
        read = PendingRead(self._plan, keys[:end], buffers[:end], nodes, until)
        if nodes and self._add(read):
            read.wait(on_arrival)
        left = len(keys) - end
        hits = read.hits() + [False] * left
        misses = read.misses() + [Miss(NotAsked.UNAVAILABLE)] * left
        self._counters.count_chunks(sum(hits), misses)
        cut_off = not _CONNECTION_FAULTS.isdisjoint(miss.cause for miss in misses)
        lacks_next = bool(misses) and misses[0].cause is ReplyFault.MISSING
        return ReadResult(hits, self._servers.clock() - started, cut_off, lacks_next)

    def stop(self) -> None:
        """Cancel all reads, under way or not begun, and end each thread."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """False if a thread is still running; it is a daemon, and touches no buffer."""
        self.stop()
        until = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    # Called by readers.

    def next(
        self, timeout: float, num_nodes: int, has_wire: Callable[[Node], bool]
    ) -> tuple[PendingRead, Node] | None:
        """Work for a reader until it calls `leave`: the oldest read and a node of it that may have
        another reader, if possible one it ``has_wire`` to. None after ``timeout`` or `stop`."""
        most = len(self.threads) if num_nodes < 2 else max(1, len(self.threads) - 1)
        with self._changed:
            turn = self._find(most, has_wire)
            if turn is None and not self.closed:
                self._changed.wait(timeout)
                turn = self._find(most, has_wire)
            if turn is None or self.closed:
                return None
            self._readers[turn[1]] += 1
            return turn

    def leave(self, node: Node) -> None:
        """Let another reader serve the node."""
        with self._changed:
            self._readers[node] -= 1
            if not self._readers[node]:
                del self._readers[node]
            if any(node in read.nodes_with_work() for read in self._reads):
                self._changed.notify_all()

    def _add(self, read: PendingRead) -> bool:
        """False if closed."""
        with self._changed:
            if self.closed:
                return False
            self._reads.append(read)
            self._changed.notify_all()
            return True

    def _find(self, most: int, has_wire: Callable[[Node], bool]) -> tuple[PendingRead, Node] | None:
        work = [(read, nodes) for read in self._reads if (nodes := read.nodes_with_work())]
        self._reads = [read for read, _ in work]
        for read, nodes in work:
            if free := [node for node in nodes if self._readers[node] < most]:
                return read, next(filter(has_wire, free), free[0])
        return None


class Reader(threading.Thread):
    def __init__(
        self,
        name: str,
        servers: Servers,
        readers: ValueReaders,
        on_spoiled: Callable[[bytes, Node], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._servers = servers
        self._connections = Connections(servers, servers.config.read_timeout_seconds)
        self._readers = readers
        self._on_spoiled = on_spoiled
        self._replies = SingleReplies()

    def run(self) -> None:
        timeout = 0.0  # connect before the first read
        while not self._readers.closed:
            turn = None
            try:
                num_nodes = len(self._servers.topology.nodes())
                turn = self._readers.next(timeout, num_nodes, self._connections.has)
                timeout = _IDLE_SECONDS
                if turn is None:
                    self._connections.maintain()
                else:
                    self._servers.refresh()
                    self._serve(*turn)
            except Exception:  # keep serving reads
                logger.exception("a read failed; its chunks count as misses")
                self._connections.close()
                if turn is not None:
                    turn[0].fail_all(Miss(NotAsked.INTERNAL_ERROR))
            finally:
                if turn is not None:
                    self._readers.leave(turn[1])
        self._connections.close()

    def _serve(self, read: PendingRead, node: Node) -> None:
        """Read the unclaimed values of ``node``."""
        clock = self._servers.clock
        connect_until = clock() + _CONNECT_SHARE * read.deadline.remaining()
        try:
            connecting = Deadline(connect_until, clock, read.deadline.cancelled)
            wire = self._connections.get(node, connecting)
        except UnavailableError:
            read.fail_node(node)
            return
        # Two batches fill the window; a small read has smaller ones, so that all readers share it.
        config = self._servers.config
        fair = read.total_bytes // (2 * config.num_connections)
        batch_bytes = max(1, min(config.batch_bytes, fair))
        with read.reading() as entered:
            if entered:
                stream = ValueStream(read, node, wire, batch_bytes, self._replies, self._on_spoiled)
                self._stream(stream, node)

    def _stream(self, stream: ValueStream, node: Node) -> None:
        """Read values from ``node``; on an error keep complete ones and fail the rest."""
        try:
            while stream.receive_batch():
                self._connections.succeeded(node)
        except BadReplyError as error:
            blame = False
            cause: ReplyFault | WireFault | NotAsked = error.fault
            if is_redirection(error.reply):
                self._servers.topology.redirected(node)
            elif error.reply.startswith(_FORBIDDEN):
                self._servers.forbids_reads(node, str(error))
                cause = NotAsked.UNAVAILABLE
            else:
                blame = error.fault in _SERVER_FAULTS
            self._connections.drop(node, str(error), blame=blame)
            stream.give_up(cause)
        except WireError as error:
            is_silent = error.fault is WireFault.STALLED
            blame = error.is_peers_fault
            self._connections.drop(node, str(error), blame=blame, at_once=is_silent)
            stream.give_up(error.fault)


def check_sizes(
    geometries: PartGeometries, keys: Sequence[bytes], buffers: Sequence[memoryview]
) -> None:
    """Raises ``ValueError`` for a key or buffer of the wrong size."""
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
