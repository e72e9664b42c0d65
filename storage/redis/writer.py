"""Threads that write chunks in the background, each value once.

A writer takes a run of chunks and writes those of one node in a burst. One pipelined round trip
asks the length of each value and leaves a claim on each chunk: whole values are not written again,
and a chunk that another writer has claimed is left to it. Then the missing values go out straight
from the chunks' buffers, one batch at a time, while the answers to the batch before are read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault
from lmcache_connector.storage.chunk_codec import HEADER_BYTES, encode_header, stripe_header
from lmcache_connector.storage.geometry import Stripe
from lmcache_connector.storage.redis.circuit_breaker import CircuitBreaker
from lmcache_connector.storage.redis.config import ValuePlan
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Counters, WriteEnd
from lmcache_connector.storage.redis.resp import command, first_line, is_redirection, set_command
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_names import chunk_tag, claim_suffix, stripe_suffix
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


class WriteRefusedError(Exception):
    """The server answered a write with the error ``reply``."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(first_line(reply))
        self.reply = reply


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
        plan: ValuePlan,
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
            tag = chunk_tag(self._plan.config.namespace, write.key)
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
        burst = _Burst(self._plan, wire, patience, self._counters, self._is_spoiled, on_end)
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


@dataclass(frozen=True, eq=False)
class _Value:
    write: PendingWrite
    stripe: Stripe
    # Not written if it exists by now, unless what exists is known to be bad.
    only_if_absent: bool


class _Burst:
    """Writes chunks to one node over one connection, once.

    ``on_end(write, end)`` is called as each chunk is done with. ``patience`` bounds each send and
    each answer. ``num_bytes``: payload bytes that were set.
    """

    def __init__(
        self,
        plan: ValuePlan,
        wire: Wire,
        patience: Deadline,
        counters: Counters,
        is_spoiled: Callable[[bytes], bool],
        on_end: Callable[[PendingWrite, WriteEnd], None],
    ) -> None:
        self._plan = plan
        self._wire = wire
        self._patience = patience
        self._counters = counters
        self._is_spoiled = is_spoiled
        self._on_end = on_end
        self._num_unanswered: dict[bytes, int] = {}
        self.num_bytes = 0

    def run(self, writes: Sequence[PendingWrite]) -> None:
        """Raises `WireError` or `WriteRefusedError`; what had no end by then is not written."""
        missing: list[_Value] = []
        for write, values in self._probe(writes):
            if values is None:
                self._on_end(write, WriteEnd.CLAIMED_ELSEWHERE)
            elif not values:
                self._on_end(write, WriteEnd.ALREADY_THERE)
            else:
                self._num_unanswered[write.key] = len(values)
                missing += values
        unanswered: deque[list[_Value]] = deque()
        for batch in self._batches(missing):
            self._wire.send(self._encode(batch), self._patience)
            unanswered.append(batch)
            if len(unanswered) > 1:
                self._collect(unanswered.popleft())
        while unanswered:
            self._collect(unanswered.popleft())

    def _probe(
        self, writes: Sequence[PendingWrite]
    ) -> list[tuple[PendingWrite, list[_Value] | None]]:
        """The values missing of each chunk; None where another writer is at work on it."""
        plan = self._plan
        commands = []
        for write in writes:
            tag = chunk_tag(plan.config.namespace, write.key)
            claim = tag + claim_suffix(plan.stripes[0])
            commands.append(command(b"SET", claim, b"1", *plan.config.claim_options))
            commands += [command(b"STRLEN", tag + stripe_suffix(s)) for s in plan.stripes]
        self._wire.send([b"".join(commands)], self._patience)
        return [(write, self._missing(write)) for write in writes]

    def _missing(self, write: PendingWrite) -> list[_Value] | None:
        claimed = self._answer_to_set()
        spoiled = self._is_spoiled(write.key)
        values = []
        for stripe in self._plan.stripes:
            length = self._answer_to_strlen()
            absent = length == 0
            if absent or spoiled or length != HEADER_BYTES + stripe.num_bytes:
                values.append(_Value(write, stripe, only_if_absent=absent and not spoiled))
        return values if claimed or spoiled or not values else None

    def _batches(self, values: Sequence[_Value]) -> Iterator[list[_Value]]:
        batch, size = list[_Value](), 0
        for value in values:
            if batch and size + value.stripe.num_bytes > self._plan.config.batch_bytes:
                yield batch
                batch, size = [], 0
            batch.append(value)
            size += value.stripe.num_bytes
        if batch:
            yield batch

    def _encode(self, batch: Sequence[_Value]) -> list[bytes | memoryview]:
        """The SETs of ``batch``; the payloads are views of the chunks' own buffers."""
        plan = self._plan
        parts: list[bytes | memoryview] = []
        for value in batch:
            write, stripe = value.write, value.stripe
            payload = write.buffer[stripe.offset : stripe.offset + stripe.num_bytes]
            expected = stripe_header(plan.geometry, stripe, write.key, keyed=plan.sealer.keyed)
            options = plan.config.ttl_options + ((b"NX",) if value.only_if_absent else ())
            name = chunk_tag(plan.config.namespace, write.key) + stripe_suffix(stripe)
            head, tail = set_command(name, HEADER_BYTES + stripe.num_bytes, options)
            parts += [head + encode_header(expected, payload, plan.sealer), payload, tail]
        # Its answer has another form than those before it, which shows that they were in step.
        parts.append(command(b"STRLEN", name))
        return parts

    def _collect(self, batch: Sequence[_Value]) -> None:
        """Read the answers to ``batch``; none counts before all have proved to be in step."""
        num_bytes = sum(v.stripe.num_bytes for v in batch if self._answer_to_set())
        if self._answer_to_strlen() != HEADER_BYTES + batch[-1].stripe.num_bytes:
            detail = "a value just written is gone"
            raise WireError(WireFault.OUT_OF_STEP, detail, is_peers_fault=False)
        self.num_bytes += num_bytes
        self._counters.count_bytes_written(num_bytes)
        for value in batch:
            self._num_unanswered[value.write.key] -= 1
            if not self._num_unanswered[value.write.key]:
                self._on_end(value.write, WriteEnd.WRITTEN)

    def _answer_to_set(self) -> bool:
        """Whether it was set; False if it exists already."""
        line = self._answer()
        if line not in (b"+OK", b"$-1"):
            raise WireError(WireFault.OUT_OF_STEP, first_line(line))
        return line == b"+OK"

    def _answer_to_strlen(self) -> int:
        line = self._answer()
        if line[:1] != b":" or not line[1:].isdigit():
            raise WireError(WireFault.OUT_OF_STEP, first_line(line))
        return int(line[1:])

    def _answer(self) -> bytes:
        """Raises `WriteRefusedError`."""
        line = self._wire.receive_line(self._patience)
        if line.startswith(b"-"):
            raise WriteRefusedError(line)
        return line


def _lower_priority() -> None:
    """Lower the priority of the calling thread; on other systems it would be the process's."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
    with contextlib.suppress(OSError):  # some sandboxes forbid it: then it is not lowered
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
