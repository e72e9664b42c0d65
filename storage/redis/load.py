"""One load: chunks wanted now, shared out over the threads that fetch them.

The caller makes a `ValueLoad` and waits. Reader threads `claim` runs of its values, receive them
into the chunks' buffers and report each as `settle`d or `fail`ed. Once the wait is over, for
whatever reason, no thread touches a buffer any more: that is what `enter` and `leave` bracket.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.storage.chunk_codec import HEADER_BYTES, ValueHeader, stripe_header
from lmcache_connector.storage.geometry import ChunkGeometry, Stripe
from lmcache_connector.storage.redis.resp import bulk_line, command
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_names import chunk_tag, stripe_suffix

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What every load of a tier has in common."""

    geometry: ChunkGeometry
    stripes: tuple[Stripe, ...]
    namespace: str
    keyed: bool
    # GET, or GETEX when hits renew the lifetime.
    verb: bytes
    verb_options: tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class ValueRequest:
    """One value on its way: the command, the reply line it must answer with, where it goes."""

    chunk: int
    command: bytes
    line: bytes
    expected: ValueHeader
    head: memoryview
    payload: memoryview
    tail: memoryview

    @property
    def reply_bytes(self) -> int:
        return len(self.head) + len(self.payload) + len(self.tail)

    @property
    def header(self) -> memoryview:
        return self.head[len(self.line) :]


class ValueLoad:
    """``buffers[i]``: ``geometry.chunk_bytes`` writable bytes for chunk ``keys[i]``.
    ``nodes[i]``: where that chunk lives."""

    def __init__(
        self,
        plan: ReadPlan,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        nodes: Sequence[Node],
        deadline: Deadline,
    ) -> None:
        self.deadline = deadline
        self.total_bytes = plan.geometry.chunk_bytes * len(keys)
        self._plan = plan
        self._keys = keys
        self._buffers = buffers
        self._changed = threading.Condition()
        self._left = [len(plan.stripes)] * len(keys)
        self._reasons: dict[int, str] = {}
        # Chunks from here on are useless: one before them is missing.
        self._end = len(keys)
        self._active = 0
        self._closed = False
        self._work = {
            node: self._requests([i for i, other in enumerate(nodes) if other == node])
            for node in dict.fromkeys(nodes)
        }

    # For reader threads.

    def nodes_with_work(self) -> list[Node]:
        with self._changed:
            return [] if self._closed else list(self._work)

    def claim(self, node: Node, max_bytes: int) -> list[ValueRequest]:
        """The next values to ask ``node`` for, ``max_bytes`` or one value; empty when none."""
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
                size += request.reply_bytes
        return claimed

    @contextmanager
    def reading(self) -> Iterator[bool]:
        """Hold the load open. Yields False, and holds nothing, when it is over already."""
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
        """The value is in place and verified."""
        with self._changed:
            self._left[request.chunk] -= 1

    def fail(self, requests: Sequence[ValueRequest], reason: str) -> None:
        """The values cannot be had; their chunks are misses. The first reason counts."""
        with self._changed:
            for request in requests:
                self._miss(request.chunk, reason)

    def fail_node(self, node: Node, reason: str) -> None:
        """Nothing more can be had from ``node``."""
        with self._changed:
            work = self._work.pop(node, None)
            request = next(work, None) if work is not None else None
            if request is not None:
                self._miss(request.chunk, reason)
            self._changed.notify_all()

    # For the caller.

    def wait(self) -> None:
        """Until all is settled, or the deadline has passed and the readers have let go."""
        with self._changed:
            while (self._work or self._active) and (left := self.deadline.remaining()) > 0.0:
                self._changed.wait(min(left, _POLL_SECONDS))
            self._closed = True
            # Bounded: readers look at the same deadline after every slice.
            while self._active:
                self._changed.wait(_POLL_SECONDS)

    def results(self) -> list[bool]:
        """Per chunk: every byte verified. Only after `wait`."""
        return [left == 0 and i not in self._reasons for i, left in enumerate(self._left)]

    def miss_reasons(self) -> list[str]:
        """Why each chunk that is missing is."""
        over = "cancelled" if self.deadline.cancelled() else "deadline"
        return [
            self._reasons.get(i, over if i < self._end else "after_miss")
            for i, hit in enumerate(self.results())
            if not hit
        ]

    def _miss(self, chunk: int, reason: str) -> None:
        self._reasons.setdefault(chunk, reason)
        self._end = min(self._end, chunk)
        if self._end == 0:
            self._work.clear()
            self._changed.notify_all()

    def _requests(self, chunks: Sequence[int]) -> Iterator[ValueRequest]:
        plan = self._plan
        for chunk in chunks:
            key = self._keys[chunk]
            tag = chunk_tag(plan.namespace, key)
            buffer = self._buffers[chunk]
            for stripe in plan.stripes:
                name = tag + stripe_suffix(stripe)
                line = bulk_line(HEADER_BYTES + stripe.num_bytes)
                yield ValueRequest(
                    chunk=chunk,
                    command=command(plan.verb, name, *plan.verb_options),
                    line=line,
                    expected=stripe_header(plan.geometry, stripe, key, keyed=plan.keyed),
                    head=memoryview(bytearray(len(line) + HEADER_BYTES)),
                    payload=buffer[stripe.offset : stripe.offset + stripe.num_bytes],
                    tail=memoryview(bytearray(2)),
                )


class ValueLoadQueue:
    """Loads with work left, oldest first."""

    def __init__(self) -> None:
        self._loads: list[ValueLoad] = []
        self._changed = threading.Condition()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def add(self, load: ValueLoad) -> bool:
        """False once closed."""
        with self._changed:
            if self._closed:
                return False
            self._loads.append(load)
            self._changed.notify_all()
            return True

    def next(self, timeout: float) -> ValueLoad | None:
        """The oldest load with work left, None after ``timeout`` seconds or when closed."""
        with self._changed:
            if not self._closed and self._oldest() is None:
                self._changed.wait(timeout)
            return None if self._closed else self._oldest()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _oldest(self) -> ValueLoad | None:
        self._loads = [load for load in self._loads if load.nodes_with_work()]
        return next(islice(self._loads, 1), None)
