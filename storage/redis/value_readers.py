"""Reader threads that share all reads from servers of one kind, each with its own connections.

A reader keeps one to two batches of requests in flight, and receives one value after the other:
the line that gives its length, then header, payload and CRLF with one system call. After a reply
that is no value, the replies behind it are discarded and the connection is closed. This costs
little, since chunks behind a missing one are useless.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import LINE_BYTES, Wire, WireError, WireFault
from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    InvalidValueError,
    check_value,
    may_be_value,
)
from lmcache_connector.storage.compression import decompress
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.client.resp import (
    CRLF,
    ReplyFault,
    bulk_length,
    classify_mismatch,
    command,
    first_line,
    is_redirection,
)
from lmcache_connector.storage.redis.config import Value, ValuePlan
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Counters, Miss, NotAsked
from lmcache_connector.storage.redis.pending_read import (
    OnArrival,
    PendingRead,
    ignore_arrivals,
)
from lmcache_connector.storage.redis.topology import Node

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.25
# Fraction of a read's time that may be spent connecting.
_CONNECT_SHARE = 0.5
# Payloads for which a copy costs less than a system call.
_SMALL_BYTES = 32 << 10
# Bad replies that count against the server; others are due to what was stored.
_SERVER_FAULTS = frozenset({ReplyFault.ERROR_REPLY, WireFault.OUT_OF_STEP})
_FORBIDDEN = b"-NOPERM "
# Faults of a stored value.
_VALUE_FAULTS = frozenset({ReplyFault.WRONG_TYPE, ReplyFault.WRONG_LENGTH})
# Misses due to the connection rather than to the server's content.
_CONNECTION_FAULTS = frozenset(
    {WireFault.DEADLINE, WireFault.CLOSED, WireFault.STALLED, NotAsked.UNAVAILABLE}
)


class BadReplyError(Exception):
    """``reply`` is the start of a reply that is not the requested value."""

    def __init__(self, fault: ReplyFault | WireFault, reply: bytes) -> None:
        super().__init__(first_line(reply))
        self.fault = fault
        self.reply = reply


@dataclass(frozen=True, slots=True)
class ReadResult:
    """``hits[i]``: chunk i was read and verified. ``seconds``: duration of the read. ``cut_off``:
    chunks are missing because a server was too slow or a connection broke."""

    hits: list[bool]
    seconds: float
    cut_off: bool


class ValueReaders:
    """``num_connections`` threads that read values from ``servers``. Thread-safe.

    With several nodes, at least one reader is kept free of any single node: a silent node blocks
    the readers that wait for it, and other nodes' chunks must still be read. ``on_spoiled(key,
    node)`` is called for chunks with a value that failed verification. Reads are counted in
    ``counters``.
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
            Reader(f"lmc-{servers.kind}-read-{i}", servers, self, plan, on_spoiled)
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
        read = PendingRead(self._plan, keys[:end], buffers[:end], nodes, limit)
        if nodes and self._add(read):
            read.wait(on_arrival)
        left = len(keys) - end
        hits = read.hits() + [False] * left
        misses = read.misses() + [Miss(NotAsked.UNAVAILABLE)] * left
        self._counters.count_chunks(sum(hits), misses)
        cut_off = not _CONNECTION_FAULTS.isdisjoint(miss.cause for miss in misses)
        return ReadResult(hits, self._servers.clock() - started, cut_off)

    def stop(self) -> None:
        """Threads end soon; reads in progress become misses."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """False if a thread is still running; it is a daemon and touches no buffer."""
        self.stop()
        until = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    # Called by readers.

    def next(
        self, timeout: float, num_nodes: int, is_near: Callable[[Node], bool]
    ) -> tuple[PendingRead, Node] | None:
        """Work for a reader until it calls `leave`: the oldest read with a free node, preferably
        one that ``is_near``. None after ``timeout`` seconds or when closed."""
        most = len(self.threads) if num_nodes < 2 else max(1, len(self.threads) - 1)
        with self._changed:
            turn = self._find(most, is_near)
            if turn is None and not self.closed:
                self._changed.wait(timeout)
                turn = self._find(most, is_near)
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

    def _find(self, most: int, is_near: Callable[[Node], bool]) -> tuple[PendingRead, Node] | None:
        work = [(read, nodes) for read in self._reads if (nodes := read.nodes_with_work())]
        self._reads = [read for read, _ in work]
        for read, nodes in work:
            if free := [node for node in nodes if self._readers[node] < most]:
                return read, next(filter(is_near, free), free[0])
        return None


class Reader(threading.Thread):
    def __init__(
        self,
        name: str,
        servers: Servers,
        readers: ValueReaders,
        plan: ValuePlan,
        on_spoiled: Callable[[bytes, Node], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._servers = servers
        self._connections = Connections(servers, servers.config.read_timeout_seconds)
        self._readers = readers
        self._plan = plan
        self._on_spoiled = on_spoiled
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._tail = memoryview(bytearray(len(CRLF)))
        self._scratch = memoryview(b"")

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
        """Read the unclaimed values of ``node``; on an error keep complete ones, fail the rest."""
        clock = self._servers.clock
        connect_until = clock() + _CONNECT_SHARE * read.deadline.remaining()
        try:
            connecting = Deadline(connect_until, clock, read.deadline.cancelled)
            wire = self._connections.get(node, connecting)
        except UnavailableError:
            read.fail_node(node)
            return
        in_flight = deque[Value]()
        fault: ReplyFault | WireFault
        with read.reading() as entered:
            try:
                if entered:
                    self._receive_all(read, node, wire, in_flight)
                return
            except BadReplyError as error:
                fault, blame = error.fault, False
                if is_redirection(error.reply):
                    self._servers.topology.redirected(node)
                elif error.reply.startswith(_FORBIDDEN):
                    self._servers.forbids_reads(node, str(error))
                else:
                    blame = fault in _SERVER_FAULTS
                self._connections.drop(node, str(error), blame=blame)
                if fault in _VALUE_FAULTS:
                    self._on_spoiled(in_flight[0].expected.key, node)
            except WireError as error:
                fault, blame = error.fault, error.is_peers_fault
                is_silent = fault is WireFault.STALLED
                self._connections.drop(node, str(error), blame=blame, at_once=is_silent)
            for number, value in enumerate(in_flight):
                read.fail(value, Miss(fault, is_behind=number > 0))

    def _receive_all(
        self, read: PendingRead, node: Node, wire: Wire, in_flight: deque[Value]
    ) -> None:
        """Request, receive and verify values until none is left. After an error, ``in_flight``
        holds the values requested and not received. Raises `BadReplyError` or `WireError`."""
        # Two batches fill the window; a small read has smaller ones, so that all readers share it.
        config, num_bytes = self._servers.config, 0
        batch_bytes = min(config.batch_bytes, read.total_bytes // (2 * config.num_connections))
        verb, options = (b"GETEX", config.ttl_options) if config.refresh_ttl else (b"GET", ())
        while True:
            while len(in_flight) < 2 or num_bytes <= batch_bytes:
                values = read.claim(node, max(1, batch_bytes))
                if not values:
                    break
                in_flight += values
                num_bytes += sum(len(value.payload) for value in values)
                commands = [command(verb, value.name, *options) for value in values]
                wire.send([b"".join(commands)], read.deadline)
            if not in_flight:
                return
            value = in_flight[0]
            stored = self._receive(value, wire, read.deadline)
            in_flight.popleft()
            num_bytes -= len(value.payload)
            try:
                if check_value(self._header, stored, value.expected, self._plan.sealer):
                    decompress(stored, value.payload, value.expected.dtype)
            except InvalidValueError as error:
                self._on_spoiled(value.expected.key, node)
                read.fail(value, Miss(error.fault))
            else:
                read.settle(value)
            self._connections.succeeded(node)

    def _receive(self, value: Value, wire: Wire, deadline: Deadline) -> memoryview:
        """Receive the value's header, and return the bytes behind it: the payload in its place, or
        a compressed one in a buffer that grows to the largest payload requested so far."""
        # Of a large reply no payload comes with the line: it is received in its place. Small
        # replies come together.
        is_small = len(value.payload) <= _SMALL_BYTES
        line = wire.receive_line(deadline, LINE_BYTES if is_small else HEADER_BYTES)
        num_bytes, stored = bulk_length(line), value.payload
        if num_bytes is None or not may_be_value(num_bytes, len(stored)):
            raise BadReplyError(classify_mismatch(line), line)
        if num_bytes != HEADER_BYTES + len(stored):
            if len(self._scratch) < len(stored):
                self._scratch = memoryview(bytearray(len(stored)))
            stored = self._scratch[: num_bytes - HEADER_BYTES]
        wire.receive([self._header, stored, self._tail], deadline)
        if self._tail != CRLF:
            raise BadReplyError(WireFault.OUT_OF_STEP, bytes(self._tail))
        return stored


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
