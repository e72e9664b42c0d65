"""Writes chunks to one node over one connection, once.

One pipelined round trip asks the length of each value and leaves a claim on each chunk: whole
values are not written again, and a chunk that another writer has claimed is left to it. Then the
missing values go out, straight from the chunks' buffers unless they are compressed, one batch at a
time, while the answers to the batch before are read. What is wrong with one chunk, or with its
slot, costs that chunk only.

A claim on a chunk of which nothing turned out missing is taken back ahead of the first batch:
should the chunk vanish a moment later, its next writer shall not wait. No chunk waits for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

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
from lmcache_connector.storage.redis.healer import RecentKeys
from lmcache_connector.storage.redis.value_names import chunk_tag, claim_suffix, stripe_suffix
from lmcache_connector.storage.redis.write_queue import PendingWrite

_MAX_KEYS = 4096
_LENGTH_BYTES = 20


class WriteRefusedError(Exception):
    """The server answered a write with the error ``reply``."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(first_line(reply))
        self.reply = reply


class WriterNotes:
    """What the threads of a tier have noticed about chunks. Thread-safe.

    A claim is left alone for ``claim_seconds``, whatever its own lifetime is: a writer may have
    died, and what lies under the claim's name need not be a claim.
    """

    def __init__(self, claim_seconds: float, clock: Callable[[], float]) -> None:
        self._claim_seconds = claim_seconds
        self._clock = clock
        self._spoiled = RecentKeys[bool](_MAX_KEYS)
        self._claimed_at = RecentKeys[float](_MAX_KEYS)

    def add_spoiled(self, key: bytes) -> None:
        """A value of the chunk did not verify: it is to be written again although it exists."""
        self._spoiled.add(key, True)

    def is_spoiled(self, key: bytes) -> bool:
        """Tells once."""
        return self._spoiled.pop(key) is not None

    def is_overdue(self, key: bytes) -> bool:
        """Whether another's claim on the chunk was met before, longer ago than claims last."""
        first = self._claimed_at.add(key, self._clock())
        return self._clock() - first > self._claim_seconds

    def forget_claim(self, key: bytes) -> None:
        self._claimed_at.pop(key)


@dataclass(eq=False)
class _Value:
    """``stored_bytes``: of its payload, compressed or not; 0 until it is sent."""

    chunk: _Chunk
    stripe: Stripe
    stored_bytes: int = 0


@dataclass(eq=False)
class _Chunk:
    """``has_failed``: some value could not be written."""

    write: PendingWrite
    num_unanswered: int = 0
    has_failed: bool = False


class Burst:
    """``on_end(write, end)`` is called as each chunk is done with. ``deadline`` bounds each send.
    ``num_bytes``: stored bytes of payloads that were set. ``was_redirected``: some chunks live
    elsewhere."""

    def __init__(
        self,
        plan: ValuePlan,
        wire: Wire,
        deadline: Deadline,
        counters: Counters,
        notes: WriterNotes,
        on_end: Callable[[PendingWrite, WriteEnd], None],
    ) -> None:
        self._plan = plan
        self._wire = wire
        self._deadline = deadline
        self._counters = counters
        self._notes = notes
        self._on_end = on_end
        self.num_bytes = 0
        self.was_redirected = False
        self._needless_claims: list[bytes] = []
        self._num_released = 0

    def run(self, writes: Sequence[PendingWrite]) -> None:
        """Raises `WireError` or `WriteRefusedError`; what had no end by then is not written."""
        missing: list[_Value] = []
        self._ask_for_all(writes)
        for write in writes:
            missing += self._missing(write)
        self._release_claims()
        unanswered: deque[list[_Value]] = deque()
        for batch in self._batches(missing):
            self._wire.send(self._encode(batch), self._deadline)
            unanswered.append(batch)
            if len(unanswered) > 1:
                self._collect(unanswered.popleft())
        while unanswered:
            self._collect(unanswered.popleft())
        self._end_releases()

    def _ask_for_all(self, writes: Sequence[PendingWrite]) -> None:
        plan, config = self._plan, self._plan.config
        commands = []
        for write in writes:
            commands.append(command(b"SET", self._claim(write), b"1", *config.claim_options))
            tag = chunk_tag(config.namespace, write.key)
            names = [tag + stripe_suffix(stripe) for stripe in plan.of(write.key).stripes]
            commands += [command(b"STRLEN", name) for name in names]
            if config.refresh_ttl:
                lifetime = config.ttl_options[1]
                commands += [command(b"PEXPIRE", name, lifetime) for name in names]
        self._wire.send([b"".join(commands)], self._deadline)

    def _missing(self, write: PendingWrite) -> list[_Value]:
        """The values of a chunk that are to be written; if there are none, the chunk is done."""
        stripes = self._plan.of(write.key).stripes
        claimed = self._answer_to_set()
        lengths = [self._answer_to_strlen() for _ in stripes]
        if self._plan.config.refresh_ttl:
            for _ in stripes:
                self._wire.receive_line(self._deadline)  # a right that lacks costs the lifetime
        chunk = _Chunk(write)
        if claimed is None or None in lengths:
            self._on_end(write, WriteEnd.FAILED)
            return []
        spoiled = self._notes.is_spoiled(write.key)
        values = [
            _Value(chunk, stripe)
            for stripe, length in zip(stripes, lengths, strict=True)
            if spoiled or length is None or not may_be_value(length, stripe.num_bytes)
        ]
        if not values:
            if claimed:
                self._needless_claims.append(self._claim(write))
            self._on_end(write, WriteEnd.ALREADY_THERE)
        elif not (claimed or spoiled or self._notes.is_overdue(write.key)):
            self._on_end(write, WriteEnd.CLAIMED_ELSEWHERE)
            return []
        self._notes.forget_claim(write.key)
        chunk.num_unanswered = len(values)
        return values

    def _claim(self, write: PendingWrite) -> bytes:
        """The name of this rank's claim on a chunk."""
        tag = chunk_tag(self._plan.config.namespace, write.key)
        return tag + claim_suffix(self._plan.of(write.key).stripes[0])

    def _release_claims(self) -> None:
        """Let them end at once: removing them takes a right that writers need not have."""
        claims, self._needless_claims = self._needless_claims, []
        if claims:
            commands = [command(b"SET", claim, b"1", b"PX", b"1") for claim in claims]
            self._wire.send([b"".join(commands)], self._deadline)
            self._num_released = len(claims)

    def _end_releases(self) -> None:
        while self._num_released:
            self._num_released -= 1
            self._answer_to_set()

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
        """The SETs of ``batch``; payloads that are not compressed are views of the chunks' own
        buffers."""
        plan = self._plan
        parts: list[bytes | memoryview] = []
        for value in batch:
            write, stripe = value.chunk.write, value.stripe
            stored: bytes | memoryview = write.buffer[stripe.offset :][: stripe.num_bytes]
            header = plan.header(write.key, stripe)
            if plan.config.codec == "blosc2" and (chunk := compress(stored, header.dtype)):
                stored, header = chunk, replace(header, compressed_bytes=len(chunk))
            value.stored_bytes = len(stored)
            name = chunk_tag(plan.config.namespace, write.key) + stripe_suffix(stripe)
            head, tail = set_command(name, HEADER_BYTES + len(stored), plan.config.ttl_options)
            parts += [head + encode_header(header, stored, plan.sealer), stored, tail]
        # Its answer has another form than those before it, which shows that they were in step.
        parts.append(command(b"STRLEN", name))
        return parts

    def _collect(self, batch: Sequence[_Value]) -> None:
        """Read the answers to ``batch``; none counts before all have proved to be in step."""
        self._end_releases()
        are_set = [self._answer_to_set() for _ in batch]
        length = self._answer_to_strlen()
        last = batch[-1]
        if length != HEADER_BYTES + last.stored_bytes:
            last.chunk.has_failed = True  # it is gone again, or another's
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
                self._on_end(chunk.write, end)

    def _answer_to_set(self) -> bool | None:
        """Whether it was set; False if it exists already, None if it lives elsewhere."""
        line = self._answer()
        if line is None:
            return None
        if line not in (b"+OK", b"$-1"):
            raise WireError(WireFault.OUT_OF_STEP, first_line(line))
        return line == b"+OK"

    def _answer_to_strlen(self) -> int | None:
        """-1 for a value of another type, None if it lives elsewhere."""
        line = self._answer()
        if line is None:
            return None
        if line.startswith(b"-WRONGTYPE"):
            return -1
        if line[:1] != b":" or not line[1:].isdigit() or len(line) > _LENGTH_BYTES:
            raise WireError(WireFault.OUT_OF_STEP, first_line(line))
        return int(line[1:])

    def _answer(self) -> bytes | None:
        """None for a redirection. Raises `WriteRefusedError` for errors about the whole server."""
        line = self._wire.receive_line(self._deadline)
        if is_redirection(line):
            self.was_redirected = True
            return None
        if line.startswith(b"-") and not line.startswith(b"-WRONGTYPE"):
            raise WriteRefusedError(line)
        return line
