"""The values that one reader requests from one node for one read, over one connection.

Requests are pipelined: about two batches are in flight. Each value is received with one call that
also takes the beginning of the next reply, which tells the next value's length: what may be
compressed has any. A reply that is not the requested value ends the connection, whose further
replies are discarded. This costs little, since chunks behind a missing one are useless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lmcache_connector.net.wire import Wire, WireFault
from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    InvalidValueError,
    check_value,
    may_be_value,
)
from lmcache_connector.storage.compression import decompress
from lmcache_connector.storage.redis.client.resp import (
    CRLF,
    ReplyFault,
    bulk_length,
    classify_mismatch,
    first_line,
)
from lmcache_connector.storage.redis.config import Value, ValuePlan
from lmcache_connector.storage.redis.counters import Miss
from lmcache_connector.storage.redis.pending_read import PendingRead
from lmcache_connector.storage.redis.topology import Node

# Faults of a stored value, rather than of the server.
_VALUE_FAULTS = frozenset({ReplyFault.WRONG_TYPE, ReplyFault.WRONG_LENGTH})


class BadReplyError(Exception):
    """``reply`` is a line that does not announce the requested value, or the end of no value."""

    def __init__(self, fault: ReplyFault | WireFault, reply: bytes) -> None:
        super().__init__(first_line(reply))
        self.fault = fault
        self.reply = reply


class ValueStream:
    """``on_spoiled(key, node)`` is called for chunks with a value that failed verification."""

    def __init__(
        self,
        plan: ValuePlan,
        read: PendingRead,
        node: Node,
        wire: Wire,
        batch_bytes: int,
        on_spoiled: Callable[[bytes, Node], None],
    ) -> None:
        self._plan = plan
        self._read = read
        self._node = node
        self._wire = wire
        self._batch_bytes = batch_bytes
        self._on_spoiled = on_spoiled
        self._in_flight: deque[Value] = deque()
        self._num_bytes = 0  # of the payloads in flight
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._tail = memoryview(bytearray(len(CRLF)))
        self._compressed = memoryview(bytearray())  # as large as the largest payload behind it

    def receive_next(self) -> bool:
        """Receive and verify the oldest value in flight. False if nothing is left to read. Raises
        `BadReplyError` or `WireError`."""
        self._top_up()
        if not self._in_flight:
            return False
        value = self._in_flight[0]
        stored = self._receive(value)
        self._in_flight.popleft()
        self._num_bytes -= len(value.payload)
        try:
            self._top_up()  # before verification, to keep the server busy
        finally:
            self._verify(value, stored)
        return True

    def give_up(self, fault: ReplyFault | WireFault) -> None:
        """Fail all values in flight."""
        for number, value in enumerate(self._in_flight):
            if fault in _VALUE_FAULTS and number == 0:
                self._on_spoiled(value.expected.key, self._node)
            self._read.fail(value, Miss(fault, is_behind=number > 0))

    def _top_up(self) -> None:
        """Keep a batch in flight behind the value that comes next."""
        while True:
            coming = len(self._in_flight[0].payload) if self._in_flight else 0
            if self._num_bytes - coming >= self._batch_bytes:
                return
            values = self._read.claim(self._node, self._batch_bytes)
            if not values:
                return
            self._in_flight += values
            self._num_bytes += sum(len(value.payload) for value in values)
            commands = b"".join(map(self._plan.read_command, values))
            self._wire.send([commands], self._read.deadline)

    def _receive(self, value: Value) -> memoryview:
        """The payload as stored, valid until the next call: in its place, or compressed."""
        # A good reply is longer, so no byte of the next reply is received with the line.
        line = self._wire.receive_line(self._read.deadline, HEADER_BYTES)
        num_bytes, payload_bytes = bulk_length(line), len(value.payload)
        if num_bytes is None or not may_be_value(num_bytes, payload_bytes):
            raise BadReplyError(classify_mismatch(line + CRLF), line)
        stored = value.payload
        if num_bytes != HEADER_BYTES + payload_bytes:
            if len(self._compressed) < payload_bytes:
                self._compressed = memoryview(bytearray(payload_bytes))
            stored = self._compressed[: num_bytes - HEADER_BYTES]
        ahead_bytes = HEADER_BYTES if len(self._in_flight) > 1 else 0
        self._wire.receive([self._header, stored, self._tail], self._read.deadline, ahead_bytes)
        if self._tail != CRLF:
            raise BadReplyError(WireFault.OUT_OF_STEP, bytes(self._tail))
        return stored

    def _verify(self, value: Value, stored: memoryview) -> None:
        """Settle the value, decompressed into place if necessary, or fail it."""
        expected = value.expected
        try:
            if check_value(self._header, stored, expected, self._plan.sealer):
                decompress(stored, value.payload, expected.dtype)
        except InvalidValueError as error:
            self._on_spoiled(expected.key, self._node)
            self._read.fail(value, Miss(error.fault))
        else:
            self._read.settle(value)
