"""The values that one reader asks of one node for one read, over one connection.

A reader keeps two batches of requests on the way. It receives a whole batch, replies and all, with
one scattered system call: every good reply has a length known beforehand, until the first value
turns up that is compressed. From then on the reader receives one value after the other, each where
its length says. A reply that is neither shifts what follows it, so nothing behind it in the
pipeline is believed and the connection is closed. That costs little, because what follows a missing
chunk is of no use anyway.
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
from lmcache_connector.storage.redis.counters import Miss
from lmcache_connector.storage.redis.pending_read import PendingRead, ValueRequest
from lmcache_connector.storage.redis.topology import Node

# Of an error reply, which tell its kind; the shortest has as many.
_ERROR_BYTES = len(b"-CLUSTERDOWN")
# Those that tell of a value that is not what its name says.
_VALUE_FAULTS = frozenset({ReplyFault.WRONG_TYPE, ReplyFault.WRONG_LENGTH})


class BadReplyError(Exception):
    """``reply`` begins unlike the value asked for."""

    def __init__(self, fault: ReplyFault | WireFault, reply: bytes) -> None:
        super().__init__(first_line(reply))
        self.fault = fault
        self.reply = reply


class SingleReplies:
    """Receives replies one by one. ``are_wanted``: in the batch that came last, some value was of
    another length than expected.

    A payload goes straight into its chunk. What may be compressed goes into one buffer of the
    reader, which is as large as the largest payload asked for so far.
    """

    def __init__(self) -> None:
        self.are_wanted = False
        self._scratch = memoryview(bytearray())

    def receive(self, wire: Wire, request: ValueRequest, deadline: Deadline) -> memoryview:
        """What lies behind the value's header, until the next call.

        Raises `BadReplyError` for a reply that is not, or too long or short for, a value; or
        `WireError`.
        """
        # A good reply is longer than its line and header: nothing of the next one comes with it.
        line = wire.receive_line(deadline, len(request.head))
        num_bytes = bulk_length(line)
        payload_bytes = len(request.payload)
        if num_bytes is None or not may_be_value(num_bytes, payload_bytes):
            raise BadReplyError(classify_mismatch(line + CRLF), line)
        self.are_wanted |= num_bytes != HEADER_BYTES + payload_bytes
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
    """Requests that are sent together, and whose replies are received together."""

    def __init__(self, requests: Sequence[ValueRequest]) -> None:
        self.left = deque(requests)
        """Not taken yet, in the order of their replies."""
        self.reply_bytes = sum(request.reply_bytes for request in requests)
        self._num_good = 0
        self._good_bytes = 0
        self._received = 0

    def command(self) -> bytes:
        return b"".join(request.command for request in self.left)

    def views(self) -> list[memoryview]:
        return [v for r in self.left for v in (r.head, r.payload, r.tail)]

    def check_replies(self, received: int) -> None:
        """Raise `BadReplyError` at the first reply that the first ``received`` bytes show to be
        wrong."""
        self._received = received
        while self._num_good < len(self.left):
            request = self.left[self._num_good]
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

    def take_good(self) -> list[ValueRequest]:
        """Requests whose replies are complete and well framed; they leave the batch."""
        good = [self.left.popleft() for _ in range(self._num_good)]
        self._received -= self._good_bytes
        self._num_good = self._good_bytes = 0
        return good

    def received(self) -> bytes:
        """What has come for those that are left, whatever it is."""
        return b"".join(self.views())[: self._received]


class ValueStream:
    """``on_spoiled(key, node)`` is told of chunks of which a value did not verify."""

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
        """Receive and verify the oldest batch on its way. False if there is nothing left to do.

        Raises `BadReplyError` or `WireError`.
        """
        self._top_up()
        if not self._in_flight:
            return False
        batch = self._in_flight[0]
        if self._replies.are_wanted:
            self._replies.are_wanted = False  # unless a value of this batch has another length
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

    def give_up(self, fault: ReplyFault | WireFault) -> None:
        """Keep what came whole, fail the rest."""
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
        """Receive and verify ``batch``, up to the first value that may be compressed."""
        try:
            self._wire.receive(batch.views(), self._read.deadline, batch.check_replies)
            batch.check_replies(batch.reply_bytes)
        except BadReplyError as error:
            if error.fault is not ReplyFault.WRONG_LENGTH:
                raise
            good = batch.take_good()
            self._wire.give_back(batch.received())
            self._replies.are_wanted = True
        else:
            good = batch.take_good()
            self._in_flight.popleft()
        try:
            self._top_up()  # before this batch is verified, so that the server is not idle
        finally:
            for request in good:
                self._verify(request, request.payload)

    def _verify(self, request: ValueRequest, stored: memoryview) -> None:
        """Settle a value that is, byte for byte, what was stored; fail any other."""
        try:
            request.verify(stored)
        except InvalidValueError as error:
            self._on_spoiled(request.expected.key, self._node)
            self._read.fail(request, Miss(error.fault))
        else:
            self._read.settle(request)
