"""A read in progress, shared among the reader threads.

The caller makes a `PendingRead` and waits. Readers `claim` runs of its values, receive them into
the chunks' buffers, and report each value as settled or failed. A reader works only inside
`PendingRead.reading`. `PendingRead.wait` returns only when no reader is inside: from then on no
thread touches a buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import WireFault
from lmcache_connector.storage.chunk_codec import HEADER_BYTES, Sealer, ValueHeader, check_value
from lmcache_connector.storage.compression import decompress
from lmcache_connector.storage.redis.client.resp import CRLF, bulk_line, command
from lmcache_connector.storage.redis.config import ValuePlan
from lmcache_connector.storage.redis.counters import Miss, NotAsked
from lmcache_connector.storage.redis.topology import Node

_POLL_SECONDS = 0.05
_ARRIVAL_BYTES = 16 << 20

OnArrival = Callable[[int], None]
"""Called on the thread that called ``read``, with the number of leading chunks that have arrived,
while others are received. No reader writes to the buffers of the arrived ones any more."""


def ignore_arrivals(count: int) -> None:
    pass


def arrivals_among(indices: Sequence[int], num_chunks: int, on_arrival: OnArrival) -> OnArrival:
    """An `OnArrival` for a read of the chunks at ``indices``: it calls ``on_arrival`` with a count
    of leading chunks of all ``num_chunks``, the others of which are there already."""
    ends = (*indices, num_chunks)
    return lambda count: on_arrival(ends[count])


@dataclass(slots=True, eq=False)
class ValueRequest:
    """One value of a chunk: its command, and the buffers for its reply.

    A good reply is ``line`` and the value's header (both in ``head``), the payload (in the chunk's
    buffer), and CRLF (``tail``). A compressed value has another line and place for its payload.
    """

    chunk: int
    command: bytes
    line: bytes
    expected: ValueHeader
    head: memoryview
    payload: memoryview
    tail: memoryview
    sealer: Sealer

    @property
    def reply_bytes(self) -> int:
        return len(self.head) + len(self.payload) + len(self.tail)

    @property
    def header(self) -> memoryview:
        return self.head[len(self.line) :]

    def verify(self, stored: memoryview) -> None:
        """Check the value, and decompress ``stored``, its received payload, into place if
        necessary. Raises `InvalidValueError`."""
        if check_value(self.header, stored, self.expected, self.sealer):
            decompress(stored, self.payload, self.expected.dtype)


class PendingRead:
    """A read of consecutive chunks of one prompt. Thread-safe.

    ``buffers[i]``: writable, of the size that the geometry of ``keys[i]`` gives. ``nodes[i]``: the
    node of that chunk, or one node per value.
    """

    def __init__(
        self,
        plan: ValuePlan,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        nodes: Sequence[Node | Sequence[Node]],
        deadline: Deadline,
    ) -> None:
        self.deadline = deadline
        self.total_bytes = sum(map(len, buffers))
        self._plan = plan
        self._keys = keys
        self._buffers = buffers
        self._changed = threading.Condition()
        self._left = [len(plan.stripes_of(key)) for key in keys]
        self._misses: dict[int, Miss] = {}
        # Chunks from this index on are useless: an earlier one is missing.
        self._end = len(keys)
        self._asked: set[int] = set()  # chunks of which a value was requested
        self._num_arrived = 0  # leading chunks
        self._report_step = max(1, _ARRIVAL_BYTES * len(keys) // max(1, self.total_bytes))
        self._report_at = self._report_step
        self._active = 0
        self._closed = False
        chunks: dict[Node, list[int]] = {}
        for i, places in enumerate(nodes):
            for node in [places] if isinstance(places, str) else dict.fromkeys(places):
                chunks.setdefault(node, []).append(i)
        self._nodes = nodes
        self._work = {node: self._requests(node, each) for node, each in chunks.items()}

    # Called by readers.

    def nodes_with_work(self) -> list[Node]:
        with self._changed:
            return [] if self._closed else list(self._work)

    def claim(self, node: Node, max_bytes: int) -> list[ValueRequest]:
        """The next values to request from ``node``, until they reach ``max_bytes``."""
        claimed: list[ValueRequest] = []
        size = 0
        with self._changed:
            work = self._work.get(node)
            while work is not None and not self._closed and size < max_bytes:
                request = next(work, None)
                if request is None or request.chunk >= self._end:
                    del self._work[node]
                    self._changed.notify_all()
                    break
                claimed.append(request)
                self._asked.add(request.chunk)
                size += request.reply_bytes
        return claimed

    @contextmanager
    def reading(self) -> Iterator[bool]:
        """Keep `wait` from returning meanwhile. Yields False if the read is already over."""
        with self._changed:
            entered = not self._closed
            self._active += entered
        try:
            yield entered
        finally:
            with self._changed:
                self._active -= entered
                self._changed.notify_all()

    def settle(self, request: ValueRequest) -> None:
        """The value is received and verified."""
        with self._changed:
            self._left[request.chunk] -= 1
            while self._num_arrived < self._end and not self._left[self._num_arrived]:
                self._num_arrived += 1
            if self._num_arrived >= self._report_at:
                self._changed.notify_all()

    def fail(self, request: ValueRequest, miss: Miss) -> None:
        """The value is unavailable, so its chunk is a miss. A chunk's first failure counts."""
        with self._changed:
            self._fail_chunk(request.chunk, miss)

    def fail_node(self, node: Node) -> None:
        """``node`` is unreachable: give up its unclaimed values."""
        with self._changed:
            request = next(self._work.pop(node, iter(())), None)
            if request is not None:
                self._fail_chunk(request.chunk, Miss(NotAsked.UNAVAILABLE))
            self._changed.notify_all()

    def fail_all(self, miss: Miss) -> None:
        """Give up all values that are left."""
        with self._changed:
            for chunk, left in enumerate(self._left):
                if left:
                    self._fail_chunk(chunk, miss)
                    break
            self._work.clear()
            self._changed.notify_all()

    # Called by the caller.

    def wait(self, on_arrival: OnArrival = ignore_arrivals) -> None:
        """Return when all is settled or the deadline has passed, and no reader is inside."""
        while count := self._wait_for_some():
            on_arrival(count)
        with self._changed:
            self._closed = True
            # Bounded: readers check the same deadline after every slice.
            while self._active:
                self._changed.wait(_POLL_SECONDS)

    def _wait_for_some(self) -> int:
        """Wait for the next few leading chunks, and return how many have arrived; 0 at the end."""
        with self._changed:
            while (self._work or self._active) and (left := self.deadline.remaining()) > 0.0:
                if self._num_arrived >= self._report_at:
                    self._report_at = self._num_arrived + self._report_step
                    return self._num_arrived
                self._changed.wait(min(left, _POLL_SECONDS))
            return 0

    def hits(self) -> list[bool]:
        """Whether each chunk is complete and verified. Only after `wait`."""
        return [left == 0 and i not in self._misses for i, left in enumerate(self._left)]

    def misses(self) -> list[Miss]:
        """The cause of each miss. Only after `wait`."""
        return [
            self._misses.get(i) or Miss(self._why_over(i))
            for i, hit in enumerate(self.hits())
            if not hit
        ]

    def _why_over(self, chunk: int) -> WireFault | NotAsked:
        if chunk >= self._end:
            return NotAsked.AFTER_MISS
        if self.deadline.cancelled():
            return WireFault.CANCELLED
        return WireFault.DEADLINE if chunk in self._asked else NotAsked.QUEUED

    def _fail_chunk(self, chunk: int, miss: Miss) -> None:
        self._misses.setdefault(chunk, miss)
        self._end = min(self._end, chunk)
        if self._end == 0:
            self._work.clear()
            self._changed.notify_all()

    def _requests(self, node: Node, chunks: Sequence[int]) -> Iterator[ValueRequest]:
        plan, config = self._plan, self._plan.config
        verb, options = (b"GETEX", config.ttl_options) if config.refresh_ttl else (b"GET", ())
        for chunk in chunks:
            key = self._keys[chunk]
            buffer = self._buffers[chunk]
            places = self._nodes[chunk]
            for number, stripe in enumerate(plan.stripes_of(key)):
                if node != (places if isinstance(places, str) else places[number]):
                    continue
                line = bulk_line(HEADER_BYTES + stripe.num_bytes)
                yield ValueRequest(
                    chunk=chunk,
                    command=command(verb, plan.name(key, stripe), *options),
                    line=line,
                    expected=plan.header(key, stripe),
                    head=memoryview(bytearray(len(line) + HEADER_BYTES)),
                    payload=buffer[stripe.offset : stripe.offset + stripe.num_bytes],
                    tail=memoryview(bytearray(len(CRLF))),
                    sealer=plan.sealer,
                )
