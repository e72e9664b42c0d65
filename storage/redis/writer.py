"""Threads that write chunks, in the background, each value once.

For every run of chunks one pipelined round trip asks the length of each value and leaves a claim:
whole values are not written again, and a chunk that another writer has claimed is left to it. Then
the missing values go out straight from the chunks' buffers, a window at a time, while the answers
to the window before are read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError
from lmcache_connector.storage.chunk_codec import HEADER_BYTES, Sealer, encode_header, stripe_header
from lmcache_connector.storage.geometry import ChunkGeometry, Stripe
from lmcache_connector.storage.redis.circuit_breaker import CircuitBreaker
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.counters import Counters
from lmcache_connector.storage.redis.resp import command, first_line, is_redirection, set_command
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_names import chunk_tag, claim_suffix, stripe_suffix
from lmcache_connector.storage.redis.write_queue import PendingWrite, WriteQueue

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.25
# Writes can wait, vLLM cannot: on a CPU that both want, a writer gets about a tenth.
_NICENESS = 10
# Chunks whose presence is asked in one round trip.
_TAKE_BYTES = 32 << 20
# Kept for metrics until they are taken; the oldest are forgotten.
_MAX_BURSTS = 1024

# Answers that say something about writing here and now. Others, such as READONLY from a master
# that is none any more, say that this is the wrong connection.
_PAUSING_ERRORS = (b"-OOM ", b"-MISCONF ", b"-NOPERM ", b"-NOREPLICAS ")


class WriteRefusedError(Exception):
    """The server answered a write with an error."""

    def __init__(self, line: bytes) -> None:
        super().__init__(first_line(line))
        self.line = line


@dataclass(frozen=True)
class WritePlan:
    """What every write of a tier has in common."""

    geometry: ChunkGeometry
    # Those of the shards this rank writes, in buffer order.
    stripes: tuple[Stripe, ...]
    namespace: str
    ttl_options: tuple[bytes, ...]
    claim_options: tuple[bytes, ...]


@dataclass(frozen=True, eq=False)
class _Value:
    write: PendingWrite
    stripe: Stripe
    # Not written if it exists by now, unless what exists is known to be bad.
    only_if_absent: bool


class Writer(threading.Thread):
    """``pause`` opens while the server refuses writes. ``is_spoiled(key)``: a value of that chunk
    did not verify when read, so write it again although it exists."""

    def __init__(
        self,
        name: str,
        servers: Servers,
        queue: WriteQueue,
        plan: WritePlan,
        sealer: Sealer,
        counters: Counters,
        pause: CircuitBreaker,
        is_spoiled: Callable[[bytes], bool],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._servers = servers
        self._links = Connections(servers, servers.config.write_timeout_seconds)
        self._queue = queue
        self._plan = plan
        self._sealer = sealer
        self._counters = counters
        self._pause = pause
        self._is_spoiled = is_spoiled
        self._stopping = threading.Event()
        self._bursts: deque[tuple[int, float]] = deque(maxlen=_MAX_BURSTS)

    def stop(self) -> None:
        """Give up what is being written within a moment."""
        self._stopping.set()

    def take_bursts(self) -> list[tuple[int, float]]:
        """Bytes and seconds of the writes that went well since the last call."""
        return [self._bursts.popleft() for _ in range(len(self._bursts))]

    def run(self) -> None:
        _lower_priority()
        self._links.tend()
        while not self._stopping.is_set():
            writes = self._queue.take(_TAKE_BYTES, _IDLE_SECONDS)
            if not writes:
                self._links.tend()
                continue
            self._links.refresh()
            for node, group in self._by_node(writes):
                self._write_group(node, group)
        self._links.close()

    def _by_node(
        self, writes: Sequence[PendingWrite]
    ) -> Iterator[tuple[Node | None, list[PendingWrite]]]:
        groups: dict[Node | None, list[PendingWrite]] = {}
        for write in writes:
            tag = chunk_tag(self._plan.namespace, write.key)
            groups.setdefault(self._servers.topology.node_of(tag), []).append(write)
        yield from groups.items()

    def _write_group(self, node: Node | None, writes: Sequence[PendingWrite]) -> None:
        left = list(writes)
        try:
            if node is None:
                raise UnavailableError("no server known")
            if not self._pause.may_connect():
                raise UnavailableError("writes pause")
            self._run_burst(_Burst(self, self._links.get(node), left))
            self._links.succeeded(node)
            self._pause.succeeded()
        except UnavailableError:
            self._counters.add("writes_unavailable", len(left))
        except WriteRefusedError as error:
            self._refused(node, error)
        except WireError as error:
            assert node is not None
            self._links.drop(node, str(error), blame=error.is_servers_fault)
        for write in left:
            self.finish(write, "chunks_failed", stored=False)

    def _run_burst(self, burst: _Burst) -> None:
        started = self._servers.clock()
        burst.run()
        if burst.num_bytes:
            self._bursts.append((burst.num_bytes, self._servers.clock() - started))

    def _refused(self, node: Node | None, error: WriteRefusedError) -> None:
        """A server that has no room, or no leave to write, has not failed: reads go on."""
        assert node is not None
        pauses = error.line.startswith(_PAUSING_ERRORS)
        self._links.drop(node, str(error), blame=not (pauses or is_redirection(error.line)))
        if pauses and self._pause.failed(at_once=True):
            detail = self._servers.redact(error)
            logger.warning("redis %s refuses writes, they pause: %s", node, detail)

    def finish(self, write: PendingWrite, counter: str, *, stored: bool) -> None:
        self._counters.add(counter)
        self._queue.finish(write, stored)

    def deadline(self) -> Deadline:
        """For one send or answer: as long as bytes move, only `stop` ends it."""
        return Deadline(float("inf"), self._servers.clock, self._stopping.is_set)

    def is_spoiled(self, key: bytes) -> bool:
        return self._is_spoiled(key)

    @property
    def plan(self) -> WritePlan:
        return self._plan

    @property
    def sealer(self) -> Sealer:
        return self._sealer

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def batch_bytes(self) -> int:
        return self._servers.config.window_bytes // 2


def _lower_priority() -> None:
    """Of the calling thread alone: that is Linux's way, elsewhere it would be the process's."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
    with contextlib.suppress(OSError):  # forbidden in some sandboxes: then it is not lowered
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


class _Burst:
    """Chunks of one node over one connection. Finished ones leave ``left``."""

    def __init__(self, writer: Writer, wire: Wire, left: list[PendingWrite]) -> None:
        self._writer = writer
        self._wire = wire
        self._left = left
        self._owed: deque[list[_Value]] = deque()
        self._num_unanswered: dict[bytes, int] = {}
        self.num_bytes = 0

    def run(self) -> None:
        """Raises `WireError` or `WriteRefusedError` with what could not be written in ``left``."""
        missing: list[_Value] = []
        for write, values in self._probe():
            if values is None:
                self._done(write, "chunks_claimed_elsewhere", stored=False)
            elif not values:
                self._done(write, "chunks_already_there", stored=True)
            else:
                self._num_unanswered[write.key] = len(values)
                missing += values
        for batch in self._batches(missing):
            self._wire.send(self._encode(batch), self._writer.deadline())
            self._owed.append(batch)
            if len(self._owed) > 1:
                self._collect(self._owed.popleft())
        while self._owed:
            self._collect(self._owed.popleft())

    def _probe(self) -> list[tuple[PendingWrite, list[_Value] | None]]:
        """What is missing of each chunk; None where another writer is at work on it."""
        plan = self._writer.plan
        commands = []
        for write in self._left:
            tag = chunk_tag(plan.namespace, write.key)
            commands.append(
                command(b"SET", tag + claim_suffix(plan.stripes[0]), b"1", *plan.claim_options)
            )
            commands += [command(b"STRLEN", tag + stripe_suffix(s)) for s in plan.stripes]
        self._wire.send([b"".join(commands)], self._writer.deadline())
        return [(write, self._missing(write)) for write in self._left]

    def _missing(self, write: PendingWrite) -> list[_Value] | None:
        claimed = self._answer_to_set()
        spoiled = self._writer.is_spoiled(write.key)
        values = []
        for stripe in self._writer.plan.stripes:
            length = self._answer_to_strlen()
            absent = length == 0
            if absent or spoiled or length != HEADER_BYTES + stripe.num_bytes:
                values.append(_Value(write, stripe, only_if_absent=absent and not spoiled))
        return values if claimed or spoiled or not values else None

    def _batches(self, values: Sequence[_Value]) -> Iterator[list[_Value]]:
        batch, size = list[_Value](), 0
        for value in values:
            if batch and size + value.stripe.num_bytes > self._writer.batch_bytes:
                yield batch
                batch, size = [], 0
            batch.append(value)
            size += value.stripe.num_bytes
        if batch:
            yield batch

    def _encode(self, batch: Sequence[_Value]) -> list[bytes | memoryview]:
        """The SETs of ``batch``, payloads being views of the chunks' own buffers."""
        plan, sealer = self._writer.plan, self._writer.sealer
        parts: list[bytes | memoryview] = []
        for value in batch:
            write, stripe = value.write, value.stripe
            payload = write.buffer[stripe.offset : stripe.offset + stripe.num_bytes]
            expected = stripe_header(plan.geometry, stripe, write.key, keyed=sealer.keyed)
            options = plan.ttl_options + ((b"NX",) if value.only_if_absent else ())
            name = chunk_tag(plan.namespace, write.key) + stripe_suffix(stripe)
            head, tail = set_command(name, HEADER_BYTES + stripe.num_bytes, options)
            parts += [head + encode_header(expected, payload, sealer), payload, tail]
        # Its answer has another form than those before it: it shows that they were in step.
        parts.append(command(b"STRLEN", name))
        return parts

    def _collect(self, batch: Sequence[_Value]) -> None:
        """Read the answers to ``batch``; none counts before all have proved to be in step."""
        num_stored = sum(v.stripe.num_bytes for v in batch if self._answer_to_set())
        if self._answer_to_strlen() != HEADER_BYTES + batch[-1].stripe.num_bytes:
            raise WireError("vanished", "a value just written is gone", is_servers_fault=False)
        self.num_bytes += num_stored
        self._writer.counters.add("bytes_written", num_stored)
        for value in batch:
            self._num_unanswered[value.write.key] -= 1
            if not self._num_unanswered[value.write.key]:
                self._done(value.write, "chunks_written", stored=True)

    def _answer_to_set(self) -> bool:
        """Whether it was set; not, when it exists already."""
        line = self._answer()
        if line not in (b"+OK", b"$-1"):
            raise WireError("out_of_step", first_line(line))
        return line == b"+OK"

    def _answer_to_strlen(self) -> int:
        line = self._answer()
        if line[:1] != b":" or not line[1:].isdigit():
            raise WireError("out_of_step", first_line(line))
        return int(line[1:])

    def _answer(self) -> bytes:
        """Raises `WriteRefusedError`."""
        line = self._wire.receive_line(self._writer.deadline())
        if line.startswith(b"-"):
            raise WriteRefusedError(line)
        return line

    def _done(self, write: PendingWrite, counter: str, *, stored: bool) -> None:
        self._left.remove(write)
        self._writer.finish(write, counter, stored=stored)
