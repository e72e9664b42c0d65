"""Writes chunks to one node over one connection.

One pipelined round trip asks for the length of each value. Complete values are not written again,
unless a reader found their chunk spoiled. Missing values are sent in batches, uncompressed ones
directly from the chunks' buffers; each batch is sent before the replies to the previous one are
read. A redirection or a key of another type affects only its chunk; other errors end the burst.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lmcache_connector.bounded import Latest, batches
from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault
from lmcache_connector.storage.chunk_codec import HEADER_BYTES, encode_header, may_be_value
from lmcache_connector.storage.compression import compress
from lmcache_connector.storage.geometry import Stripe
from lmcache_connector.storage.redis.client.resp import (
    command,
    first_line,
    is_redirection,
    set_command,
)
from lmcache_connector.storage.redis.config import ValuePlan
from lmcache_connector.storage.redis.counters import Counters, WriteEnd
from lmcache_connector.storage.redis.write_queue import PendingWrite

_MAX_SPOILED = 4096
_LENGTH_BYTES = 20


class WriteRefusedError(Exception):
    """The server answered a write with the error ``reply``."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(first_line(reply))
        self.reply = reply


class SpoiledChunks:
    """Chunks of which a value failed verification: writes replace all their values, until a write
    has succeeded. Bounded; the oldest are forgotten. Thread-safe."""

    def __init__(self) -> None:
        self._keys: Latest[bytes, None] = Latest(_MAX_SPOILED)
        self._lock = threading.Lock()

    def add(self, key: bytes) -> None:
        with self._lock:
            self._keys[key] = None

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def remove(self, key: bytes) -> None:
        with self._lock:
            self._keys.pop(key, None)


@dataclass(eq=False)
class _Value:
    """``stored_bytes``: size of the payload as stored; 0 until it is sent."""

    chunk: _Chunk
    stripe: Stripe
    stored_bytes: int = 0


@dataclass(eq=False)
class _Chunk:
    """``is_spoiled``: write all its values. ``has_failed``: a value could not be written."""

    write: PendingWrite
    is_spoiled: bool
    num_unanswered: int = 0
    has_failed: bool = False


class Burst:
    """``on_end(write, end)`` is called when a chunk is finished. ``deadline``: of the burst.
    ``num_bytes``: payload bytes stored. ``was_redirected``: another node holds some chunks."""

    def __init__(
        self,
        plan: ValuePlan,
        wire: Wire,
        deadline: Deadline,
        counters: Counters,
        spoiled: SpoiledChunks,
        on_end: Callable[[PendingWrite, WriteEnd], None],
    ) -> None:
        self._plan = plan
        self._wire = wire
        self._deadline = deadline
        self._counters = counters
        self._spoiled = spoiled
        self._on_end = on_end
        self.num_bytes = 0
        self.was_redirected = False

    def run(self, writes: Sequence[PendingWrite]) -> None:
        """Raises `WireError` or `WriteRefusedError`; chunks without `on_end` may lack values."""
        missing: list[_Value] = []
        self._ask_for_all(writes)
        for write in writes:
            missing += self._missing(write)
        unanswered: deque[list[_Value]] = deque()
        batch_bytes = self._plan.config.batch_bytes
        for batch in batches(missing, lambda value: value.stripe.num_bytes, batch_bytes):
            self._wire.send(self._encode(batch), self._deadline)
            unanswered.append(batch)
            if len(unanswered) > 1:
                self._collect(unanswered.popleft())
        while unanswered:
            self._collect(unanswered.popleft())

    def _ask_for_all(self, writes: Sequence[PendingWrite]) -> None:
        plan, config = self._plan, self._plan.config
        commands = []
        for write in writes:
            names = [plan.name(write.key, stripe) for stripe in plan.stripes_of(write.key)]
            commands += [command(b"STRLEN", name) for name in names]
            if config.refresh_ttl:
                lifetime = config.ttl_options[1]
                commands += [command(b"PEXPIRE", name, lifetime) for name in names]
        self._wire.send([b"".join(commands)], self._deadline)

    def _missing(self, write: PendingWrite) -> list[_Value]:
        """The values of a chunk to be written; if none, the chunk is finished."""
        stripes = self._plan.stripes_of(write.key)
        lengths = [self._answer_to_strlen() for _ in stripes]
        if self._plan.config.refresh_ttl:
            for _ in stripes:
                self._wire.receive_line(self._deadline)  # without permission, TTL is not renewed
        if None in lengths:
            self._on_end(write, WriteEnd.FAILED)
            return []
        chunk = _Chunk(write, is_spoiled=write.key in self._spoiled)
        values = [
            _Value(chunk, stripe)
            for stripe, length in zip(stripes, lengths, strict=True)
            if chunk.is_spoiled or length is None or not may_be_value(length, stripe.num_bytes)
        ]
        if not values:
            self._on_end(write, WriteEnd.ALREADY_THERE)
        chunk.num_unanswered = len(values)
        return values

    def _encode(self, batch: Sequence[_Value]) -> list[bytes | memoryview]:
        """The SETs of ``batch``. Uncompressed payloads are views of the chunks' buffers."""
        plan = self._plan
        parts: list[bytes | memoryview] = []
        for value in batch:
            write, stripe = value.chunk.write, value.stripe
            stored: bytes | memoryview = write.buffer[stripe.offset :][: stripe.num_bytes]
            header = plan.header(write.key, stripe)
            if plan.config.codec == "blosc2" and (small := compress(stored, header.dtype)):
                stored, header = small, replace(header, compressed_bytes=len(small))
            value.stored_bytes = len(stored)
            name = plan.name(write.key, stripe)
            head, tail = set_command(name, HEADER_BYTES + len(stored), plan.config.ttl_options)
            parts += [head + encode_header(header, stored, plan.sealer), stored, tail]
        # An integer reply, unlike those to SET, shows that replies are in step.
        parts.append(command(b"STRLEN", name))
        return parts

    def _collect(self, batch: Sequence[_Value]) -> None:
        """Read the replies to ``batch``; they count only once all are known to be in step."""
        are_set = [self._answer_to_set() for _ in batch]
        length = self._answer_to_strlen()
        last = batch[-1]
        if length != HEADER_BYTES + last.stored_bytes:
            last.chunk.has_failed = True  # evicted or overwritten meanwhile
        answered = list(zip(batch, are_set, strict=True))
        num_bytes = sum(value.stored_bytes for value, is_set in answered if is_set)
        self.num_bytes += num_bytes
        self._counters.count_bytes_written(num_bytes)
        for value, is_set in answered:
            chunk = value.chunk
            chunk.has_failed |= not is_set
            chunk.num_unanswered -= 1
            if not chunk.num_unanswered:
                end = WriteEnd.FAILED if chunk.has_failed else WriteEnd.WRITTEN
                if chunk.is_spoiled and end.is_stored:
                    self._spoiled.remove(chunk.write.key)
                self._on_end(chunk.write, end)

    def _answer_to_set(self) -> bool:
        """False for a redirection."""
        line = self._answer()
        if line not in (b"+OK", None):
            raise WireError(WireFault.OUT_OF_STEP, first_line(line))
        return line is not None

    def _answer_to_strlen(self) -> int | None:
        """-1 for a value of another type, None for a redirection."""
        line = self._answer()
        if line is None:
            return None
        if line.startswith(b"-WRONGTYPE"):
            return -1
        if line[:1] != b":" or not line[1:].isdigit() or len(line) > _LENGTH_BYTES:
            raise WireError(WireFault.OUT_OF_STEP, first_line(line))
        return int(line[1:])

    def _answer(self) -> bytes | None:
        """None for a redirection. Raises `WriteRefusedError` for errors of the whole server."""
        line = self._wire.receive_line(self._deadline)
        if is_redirection(line):
            self.was_redirected = True
            return None
        if line.startswith(b"-") and not line.startswith(b"-WRONGTYPE"):
            raise WriteRefusedError(line)
        return line
