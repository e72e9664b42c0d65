"""The values that one reader requests from one node for one read, over one connection.

A reader keeps two batches of requests in flight. The length of a good, uncompressed reply is known,
so a batch is received at once: ``recvmsg`` fills headers and chunks. At the first reply of another
length, as of a compressed value, the rest of the batch and the next one are received one by one.
Errors and missing values shift the replies behind them, which are discarded: the connection is
closed. This costs little, since chunks behind a missing one are useless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireFault
from lmcache_connector.storage.chunk_codec import HEADER_BYTES, InvalidValueError, may_be_value
from lmcache_connector.storage.redis.client.resp import (
    CRLF,
    ReplyFault,
    bulk_length,
    classify_mismatch,
    first_line,
)
from lmcache_connector.storage.redis.counters import Miss, NotAsked
from lmcache_connector.storage.redis.pending_read import PendingRead, ValueRequest
from lmcache_connector.storage.redis.topology import Node

# Faults of a stored value, rather than of the server.
_VALUE_FAULTS = frozenset({ReplyFault.WRONG_TYPE, ReplyFault.WRONG_LENGTH})


class BadReplyError(Exception):
    """``reply`` is the start of a reply that is not the requested value."""

    def __init__(self, fault: ReplyFault | WireFault, reply: bytes) -> None:
        super().__init__(first_line(reply))
        self.fault = fault
        self.reply = reply


class SingleReplies:
    """Receives replies one by one. ``is_active``: a value of the latest batch did not have its
    uncompressed length, so the next batch is received in this way.

    An uncompressed payload goes directly into its chunk, a compressed one into a buffer of the
    reader, which is as large as the largest payload requested in this way.
    """

    def __init__(self) -> None:
        self.is_active = False
        self._scratch = memoryview(bytearray())

    def receive(self, wire: Wire, request: ValueRequest, deadline: Deadline) -> memoryview:
        """The bytes behind the value's header, valid until the next call. Raises `WireError`, and
        `BadReplyError` for a reply that cannot be the value."""
        # A good reply is longer than its line and header, so no byte of the next reply is read.
        line = wire.receive_line(deadline, len(request.head))
        num_bytes = bulk_length(line)
        payload_bytes = len(request.payload)
        if num_bytes is None or not may_be_value(num_bytes, payload_bytes):
            raise BadReplyError(classify_mismatch(line + CRLF), line)
        self.is_active |= num_bytes != HEADER_BYTES + payload_bytes
        stored = self._place(request, num_bytes - HEADER_BYTES)
        wire.receive_behind([request.header, stored, request.tail], deadline)
        if request.tail != CRLF:
            raise BadReplyError(WireFault.OUT_OF_STEP, bytes(request.tail))
        return stored

    def _place(self, request: ValueRequest, stored_bytes: int) -> memoryview:
        if stored_bytes == len(request.payload):
            return request.payload
        if len(self._scratch) < len(request.payload):
            self._scratch = memoryview(bytearray(len(request.payload)))
        return self._scratch[:stored_bytes]


class Batch:
    """Requests that are sent together and whose replies are received together."""

    def __init__(self, requests: Sequence[ValueRequest]) -> None:
        self.left = deque(requests)
        """Requests not taken yet, in the order of their replies."""
        self.reply_bytes = sum(request.reply_bytes for request in requests)
        self._num_good = 0
        self._good_bytes = 0
        self._received = 0

    def command(self) -> bytes:
        return b"".join(request.command for request in self.left)

    def views(self) -> list[memoryview]:
        return [v for r in self.left for v in (r.head, r.payload, r.tail)]

    def check_replies(self, received: int) -> None:
        """Raise `BadReplyError` at the first wrong reply in the first ``received`` bytes."""
        self._received = received
        while self._num_good < len(self.left):
            request = self.left[self._num_good]
            here = received - self._good_bytes
            line = bytes(request.head[: max(0, min(here, len(request.line)))])
            if not request.line.startswith(line):
                head = bytes(request.head[:here])
                if head[:1] == b"-" and here < len(request.head) and CRLF not in head:
                    return  # the rest of the error tells its kind
                raise BadReplyError(classify_mismatch(head), head)
            if here < request.reply_bytes:
                return
            if request.tail != CRLF:
                raise BadReplyError(WireFault.OUT_OF_STEP, bytes(request.tail))
            self._num_good += 1
            self._good_bytes += request.reply_bytes

    def take_good(self) -> list[ValueRequest]:
        """Remove and return requests whose replies are complete and well framed."""
        good = [self.left.popleft() for _ in range(self._num_good)]
        self._received -= self._good_bytes
        self._num_good = self._good_bytes = 0
        return good

    def received(self) -> bytes:
        return b"".join(self.views())[: self._received]


class ValueStream:
    """``on_spoiled(key, node)`` is called for chunks with a value that failed verification."""

    def __init__(
        self,
        read: PendingRead,
        node: Node,
        wire: Wire,
        batch_bytes: int,
        replies: SingleReplies,
        on_spoiled: Callable[[bytes, Node], None],
    ) -> None:
        self._read = read
        self._node = node
        self._wire = wire
        self._batch_bytes = batch_bytes
        self._replies = replies
        self._on_spoiled = on_spoiled
        self._in_flight: deque[Batch] = deque()

    def receive_batch(self) -> bool:
        """Receive and verify the oldest batch in flight. False if nothing is left to read. Raises
        `BadReplyError` or `WireError`."""
        self._top_up()
        if not self._in_flight:
            return False
        batch = self._in_flight[0]
        if self._replies.is_active:
            self._replies.is_active = False  # until a value of this batch has another length
        else:
            self._receive_at_once(batch)
        while batch.left:
            request = batch.left[0]
            stored = self._replies.receive(self._wire, request, self._read.deadline)
            batch.left.popleft()
            self._verify(request, stored)
        if self._in_flight and self._in_flight[0] is batch:
            self._in_flight.popleft()
        return True

    def give_up(self, fault: ReplyFault | WireFault | NotAsked) -> None:
        """Keep complete values, fail the rest."""
        is_behind = False
        for batch in self._in_flight:
            for request in batch.take_good():
                self._verify(request, request.payload)
            for request in batch.left:
                if fault in _VALUE_FAULTS and not is_behind:
                    self._on_spoiled(request.expected.key, self._node)
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

    def _receive_at_once(self, batch: Batch) -> None:
        """Receive and verify ``batch``, up to the first value of another length."""
        try:
            self._wire.receive(batch.views(), self._read.deadline, batch.check_replies)
            batch.check_replies(batch.reply_bytes)
        except BadReplyError as error:
            if error.fault is not ReplyFault.WRONG_LENGTH:
                raise
            good = batch.take_good()
            self._wire.unread(batch.received())
            self._replies.is_active = True
        else:
            good = batch.take_good()
            self._in_flight.popleft()
        try:
            self._top_up()  # before verification, to keep the server busy
        finally:
            for request in good:
                self._verify(request, request.payload)

    def _verify(self, request: ValueRequest, stored: memoryview) -> None:
        """Settle the value if it passes verification, else fail it."""
        try:
            request.verify(stored)
        except InvalidValueError as error:
            self._on_spoiled(request.expected.key, self._node)
            self._read.fail(request, Miss(error.fault))
        else:
            self._read.settle(request)
