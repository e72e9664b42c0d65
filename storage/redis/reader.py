"""Threads that read values, each over connections of its own.

A reader keeps two batches of requests on the way. It receives a whole batch, replies and all, with
one scattered system call: every good reply has a length known beforehand. A reply that is not as
expected shifts what follows it, so nothing behind it in the pipeline is believed and the connection
is closed. That costs little, because what follows a missing chunk is of no use anyway.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault
from lmcache_connector.storage.chunk_codec import InvalidValueError
from lmcache_connector.storage.redis.client.resp import (
    CRLF,
    ReplyFault,
    classify_mismatch,
    first_line,
    is_redirection,
)
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Miss, NotAsked
from lmcache_connector.storage.redis.read_queue import PendingRead, ReadQueue, ValueRequest
from lmcache_connector.storage.redis.topology import Node

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.25
# Of the time a read has, for connecting to a server that is not connected.
_CONNECT_SHARE = 0.5
# Bad replies for which the server is to blame; the others come from what was stored there.
_SERVER_FAULTS = frozenset({ReplyFault.ERROR_REPLY, WireFault.OUT_OF_STEP})
# Of an error reply, which tell its kind; the shortest has as many.
_ERROR_BYTES = len(b"-CLUSTERDOWN")
# Those that tell of a value that is not what its name says.
_VALUE_FAULTS = frozenset({ReplyFault.WRONG_TYPE, ReplyFault.WRONG_LENGTH})


class Reader(threading.Thread):
    """``on_spoiled(request)`` is told of values whose stored bytes did not verify."""

    def __init__(
        self,
        name: str,
        servers: Servers,
        queue: ReadQueue,
        on_spoiled: Callable[[ValueRequest], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._servers = servers
        self._connections = Connections(servers, servers.config.read_timeout_seconds)
        self._queue = queue
        self._on_spoiled = on_spoiled

    def run(self) -> None:
        timeout = 0.0  # connect before there is anything to read
        while not self._queue.closed:
            read = None
            try:
                read = self._queue.next(timeout)
                timeout = _IDLE_SECONDS
                if read is None:
                    self._connections.tend()
                else:
                    self._read(read)
            except Exception:  # whatever it is, the next read may fare better
                logger.exception("a read from redis failed; its chunks count as misses")
                self._connections.close()
                if read is not None:
                    read.fail_all(Miss(NotAsked.INTERNAL_ERROR))
        self._connections.close()

    def _read(self, read: PendingRead) -> None:
        """Serve it for a while, the servers first that need not be connected to."""
        self._servers.refresh()
        for node in sorted(read.nodes_with_work(), key=self._connections.has, reverse=True):
            self._serve(read, node)

    def _serve(self, read: PendingRead, node: Node) -> None:
        clock = self._servers.clock
        connect_until = clock() + _CONNECT_SHARE * read.deadline.remaining()
        try:
            connecting = Deadline(connect_until, clock, read.deadline.cancelled)
            wire = self._connections.get(node, connecting)
        except UnavailableError:
            read.fail_node(node)
            return
        # Two batches in the window; smaller ones for small reads, so that all readers get some.
        config = self._servers.config
        fair = read.total_bytes // (2 * config.num_connections)
        batch_bytes = max(1, min(config.batch_bytes, fair))
        with read.reading() as entered:
            if entered:
                self._stream(_Stream(read, node, wire, batch_bytes, self._on_spoiled), node)

    def _stream(self, stream: _Stream, node: Node) -> None:
        """Read what can be read from ``node``; keep what came whole and fail the rest."""
        try:
            while stream.receive_batch():
                self._connections.succeeded(node)
        except BadReplyError as error:
            blame = error.fault in _SERVER_FAULTS and not is_redirection(error.reply)
            self._connections.drop(node, str(error), blame=blame)
            stream.give_up(error.fault)
        except WireError as error:
            self._connections.drop(node, str(error), blame=error.is_peers_fault)
            stream.give_up(error.fault)


class BadReplyError(Exception):
    """``reply`` begins unlike the value asked for."""

    def __init__(self, fault: ReplyFault | WireFault, reply: bytes) -> None:
        super().__init__(first_line(reply))
        self.fault = fault
        self.reply = reply


class Batch:
    """Requests that are sent together, and whose replies are received together."""

    def __init__(self, requests: Sequence[ValueRequest]) -> None:
        self.requests = requests
        self.reply_bytes = sum(request.reply_bytes for request in requests)
        self._num_good = 0
        self._good_bytes = 0

    def command(self) -> bytes:
        return b"".join(request.command for request in self.requests)

    def views(self) -> list[memoryview]:
        return [v for r in self.requests for v in (r.head, r.payload, r.tail)]

    def check_replies(self, received: int) -> None:
        """Raise `BadReplyError` at the first reply that the first ``received`` bytes show to be
        wrong."""
        while self._num_good < len(self.requests):
            request = self.requests[self._num_good]
            here = received - self._good_bytes
            line = bytes(request.head[: max(0, min(here, len(request.line)))])
            if not request.line.startswith(line):
                head = bytes(request.head[:here])
                if head[:1] == b"-" and here < _ERROR_BYTES:
                    return  # what kind of error, is still to come
                raise BadReplyError(classify_mismatch(head), head)
            if here < request.reply_bytes:
                return
            if request.tail != CRLF:
                raise BadReplyError(WireFault.OUT_OF_STEP, bytes(request.tail))
            self._num_good += 1
            self._good_bytes += request.reply_bytes

    @property
    def good(self) -> Sequence[ValueRequest]:
        """Requests whose replies are complete and well framed."""
        return self.requests[: self._num_good]

    @property
    def bad(self) -> Sequence[ValueRequest]:
        """The other requests."""
        return self.requests[self._num_good :]


class _Stream:
    """What one reader asks of one node for one read, over one connection."""

    def __init__(
        self,
        read: PendingRead,
        node: Node,
        wire: Wire,
        batch_bytes: int,
        on_spoiled: Callable[[ValueRequest], None],
    ) -> None:
        self._read = read
        self._node = node
        self._wire = wire
        self._batch_bytes = batch_bytes
        self._on_spoiled = on_spoiled
        self._in_flight: deque[Batch] = deque()

    def receive_batch(self) -> bool:
        """Receive and verify the oldest batch on its way. False if there is nothing left to do.

        Raises `BadReplyError` or `WireError`.
        """
        self._top_up()
        if not self._in_flight:
            return False
        batch = self._in_flight[0]
        self._wire.receive(batch.views(), self._read.deadline, batch.check_replies)
        batch.check_replies(batch.reply_bytes)
        self._in_flight.popleft()
        try:
            self._top_up()  # before the next batch is verified, so that the server is not idle
        finally:
            self._verify(batch.requests)
        return True

    def give_up(self, fault: ReplyFault | WireFault) -> None:
        """Keep what came whole, fail the rest."""
        is_behind = False
        for batch in self._in_flight:
            self._verify(batch.good)
            for request in batch.bad:
                if fault in _VALUE_FAULTS and not is_behind:
                    self._on_spoiled(request)
                self._read.fail(request, Miss(fault, is_behind))
                is_behind = True

    def _top_up(self) -> None:
        while len(self._in_flight) < 2:
            requests = self._read.claim(self._node, self._batch_bytes)
            if not requests:
                return
            batch = Batch(requests)
            self._in_flight.append(batch)
            self._wire.send([batch.command()], self._read.deadline)

    def _verify(self, requests: Sequence[ValueRequest]) -> None:
        """Settle the values that are, byte for byte, what was stored; fail the others."""
        for request in requests:
            try:
                request.verify()
            except InvalidValueError as error:
                self._on_spoiled(request)
                self._read.fail(request, Miss(error.fault))
            else:
                self._read.settle(request)
