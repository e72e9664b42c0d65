"""Threads that fetch values for loads, each over connections of its own.

A reader keeps two batches of requests on the way and receives one whole batch, replies and all,
with one scattered system call: every good reply has a length known beforehand. A reply that is not
as expected shifts what follows it, so nothing after it in the pipeline is believed and the
connection is closed. That costs little: what follows a missing chunk is of no use anyway.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError
from lmcache_connector.storage.chunk_codec import InvalidValueError, Sealer, check_value
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Counters
from lmcache_connector.storage.redis.load import ValueLoad, ValueLoadQueue, ValueRequest
from lmcache_connector.storage.redis.resp import CRLF, describe_mismatch, first_line, is_redirection
from lmcache_connector.storage.redis.topology import Node

_IDLE_SECONDS = 0.25
# Bad replies that speak against the server; the others speak against what was stored there.
_SERVER_FAULTS = frozenset({"error_reply", "out_of_step"})


class BadReplyError(Exception):
    """The reply to ``requests[index]`` is not the value asked for."""

    def __init__(self, index: int, reason: str, detail: bytes) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason
        self.detail = detail


class Batch:
    """Requests sent together, to be received together."""

    def __init__(self, requests: Sequence[ValueRequest]) -> None:
        self.requests = requests
        self.reply_bytes = sum(request.reply_bytes for request in requests)
        self._good = 0
        self._good_bytes = 0

    def commands(self) -> list[bytes]:
        return [request.command for request in self.requests]

    def views(self) -> list[memoryview]:
        return [v for r in self.requests for v in (r.head, r.payload, r.tail)]

    def check_replies(self, received: int) -> None:
        """Raise `BadReplyError` at the first reply that the bytes so far show to be wrong."""
        while self._good < len(self.requests):
            request = self.requests[self._good]
            here = received - self._good_bytes
            line = bytes(request.head[: max(0, min(here, len(request.line)))])
            if not request.line.startswith(line):
                head = bytes(request.head[:here])
                raise BadReplyError(self._good, describe_mismatch(head), head)
            if here < request.reply_bytes:
                return
            if request.tail != CRLF:
                raise BadReplyError(self._good, "out_of_step", bytes(request.tail))
            self._good += 1
            self._good_bytes += request.reply_bytes

    def complete(self) -> Sequence[ValueRequest]:
        """Requests whose replies are all there and well framed."""
        return self.requests[: self._good]


class Reader(threading.Thread):
    """``spoiled(key)`` is told of chunks whose stored bytes did not verify."""

    def __init__(
        self,
        name: str,
        servers: Servers,
        loads: ValueLoadQueue,
        sealer: Sealer,
        counters: Counters,
        spoiled: Callable[[bytes], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._servers = servers
        self._links = Connections(servers, servers.config.read_timeout_seconds)
        self._loads = loads
        self._sealer = sealer
        self._counters = counters
        self._spoiled = spoiled

    def run(self) -> None:
        self._links.tend()
        while not self._loads.closed:
            load = self._loads.next(_IDLE_SECONDS)
            if load is None:
                self._links.tend()
                continue
            self._links.refresh()
            for node in load.nodes_with_work():
                self._serve(load, node)
        self._links.close()

    def _serve(self, load: ValueLoad, node: Node) -> None:
        try:
            wire = self._links.get(node)
        except UnavailableError as error:
            load.fail_node(node, error.reason)
            return
        with load.reading() as entered:
            if entered:
                _Stream(self, load, node, wire).run()

    def verify(self, load: ValueLoad, requests: Sequence[ValueRequest]) -> None:
        """Settle what is byte for byte what was stored, fail the rest. Runs on the stream."""
        for request in requests:
            try:
                check_value(request.header, request.payload, request.expected, self._sealer)
            except InvalidValueError as error:
                self._spoiled(request.expected.key)
                load.fail([request], error.reason)
            else:
                load.settle(request)
                self._counters.add("bytes_read", len(request.payload))

    def succeeded(self, node: Node) -> None:
        self._links.succeeded(node)

    def drop(self, node: Node, detail: str, *, blame: bool) -> None:
        self._links.drop(node, detail, blame=blame)

    @property
    def window_bytes(self) -> int:
        return self._servers.config.window_bytes

    @property
    def num_readers(self) -> int:
        return self._servers.config.num_connections


class _Stream:
    """One load's requests to one node over one connection."""

    def __init__(self, reader: Reader, load: ValueLoad, node: Node, wire: Wire) -> None:
        self._reader = reader
        self._load = load
        self._node = node
        self._wire = wire
        self._in_flight: deque[Batch] = deque()
        # Two batches in the window; smaller ones for small loads, so that all readers get some.
        fair = load.total_bytes // (2 * reader.num_readers)
        self._batch_bytes = max(1, min(reader.window_bytes // 2, fair))

    def run(self) -> None:
        try:
            self._top_up(self._load.deadline)
            while self._in_flight:
                batch = self._in_flight[0]
                self._wire.receive(batch.views(), self._load.deadline, batch.check_replies)
                batch.check_replies(batch.reply_bytes)
                self._in_flight.popleft()
                try:
                    self._top_up(self._load.deadline)
                finally:
                    self._reader.verify(self._load, batch.requests)
                self._reader.succeeded(self._node)
        except BadReplyError as error:
            blame = error.reason in _SERVER_FAULTS and not is_redirection(error.detail)
            self._reader.drop(self._node, first_line(error.detail), blame=blame)
            self._give_up(error.reason)
        except WireError as error:
            self._reader.drop(self._node, str(error), blame=error.is_servers_fault)
            self._give_up(error.reason)

    def _top_up(self, deadline: Deadline) -> None:
        while len(self._in_flight) < 2:
            requests = self._load.claim(self._node, self._batch_bytes)
            if not requests:
                return
            batch = Batch(requests)
            self._in_flight.append(batch)
            self._wire.send([b"".join(batch.commands())], deadline)

    def _give_up(self, reason: str) -> None:
        """Keep what came whole, fail the rest."""
        first = True
        for batch in self._in_flight:
            complete = batch.complete()
            self._reader.verify(self._load, complete)
            for request in batch.requests[len(complete) :]:
                self._load.fail([request], reason if first else "after_" + reason)
                first = False
