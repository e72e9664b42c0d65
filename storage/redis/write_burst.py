"""Writes a run of chunks to one node over one connection, each value once.

One pipelined round trip asks the length of each value and leaves a claim on each chunk: whole
values are not written again, and a chunk that another writer has claimed is left to it. Then the
missing values go out straight from the chunks' buffers, one batch at a time, while the answers to
the batch before are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault
from lmcache_connector.storage.chunk_codec import HEADER_BYTES, Sealer, encode_header, stripe_header
from lmcache_connector.storage.geometry import ChunkGeometry, Stripe
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.counters import Counters, WriteEnd
from lmcache_connector.storage.redis.resp import command, first_line, set_command
from lmcache_connector.storage.redis.value_names import chunk_tag, claim_suffix, stripe_suffix
from lmcache_connector.storage.redis.write_queue import PendingWrite


class WriteRefusedError(Exception):
    """The server answered a write with the error ``reply``."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(first_line(reply))
        self.reply = reply


@dataclass(frozen=True)
class WritePlan:
    """What all writes of a tier have in common."""

    geometry: ChunkGeometry
    # Those of the shards this rank writes, in buffer order.
    stripes: tuple[Stripe, ...]
    namespace: str
    sealer: Sealer
    ttl_options: tuple[bytes, ...]
    claim_options: tuple[bytes, ...]
    # Bytes of values sent before the answers to the batch before are read.
    batch_bytes: int

    @classmethod
    def make(
        cls, config: RedisTierConfig, geometry: ChunkGeometry, shards: tuple[int, ...]
    ) -> WritePlan:
        stripes = geometry.stripes(config.max_payload_bytes)
        return cls(
            geometry=geometry,
            stripes=tuple(stripe for stripe in stripes if stripe.shard in shards),
            namespace=config.namespace,
            sealer=Sealer(config.hash_key),
            ttl_options=config.ttl_options,
            claim_options=(b"NX", b"PX", b"%d" % round(config.claim_seconds * 1000)),
            batch_bytes=config.window_bytes // 2,
        )


@dataclass(frozen=True, eq=False)
class _Value:
    write: PendingWrite
    stripe: Stripe
    # Not written if it exists by now, unless what exists is known to be bad.
    only_if_absent: bool


class WriteBurst:
    """Runs once. ``on_end(write, end)`` is called as each chunk is done with; ``patience`` bounds
    each send and each answer. ``num_bytes``: payload bytes that were set."""

    def __init__(
        self,
        plan: WritePlan,
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
            tag = chunk_tag(plan.namespace, write.key)
            claim = tag + claim_suffix(plan.stripes[0])
            commands.append(command(b"SET", claim, b"1", *plan.claim_options))
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
            if batch and size + value.stripe.num_bytes > self._plan.batch_bytes:
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
            options = plan.ttl_options + ((b"NX",) if value.only_if_absent else ())
            name = chunk_tag(plan.namespace, write.key) + stripe_suffix(stripe)
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
