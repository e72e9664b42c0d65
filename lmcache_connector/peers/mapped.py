"""Copies chunks out of the memory of another process on this host.

The owner's CPU tier is a memfd, passed over a Unix socket by ``MAP``. To read chunks, a reader
leases them (``LEASE`` returns each value's offset and header), copies them out of its read-only
mapping, verifies the seals of its copies, and sends ``RELEASE``. While it copies, the owner answers
the next ``LEASE``. A reader that was stopped for long may have lost its leases and copy overwritten
bytes: their seal, made of the leased bytes, then differs, and the copy is not used. The mapping
ends with the connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from lmcache_connector.bounded import batches
from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault
from lmcache_connector.peers.commands import NOWHERE, PLACE
from lmcache_connector.storage.chunk_codec import (
    InvalidValueError,
    Sealer,
    check_value,
)
from lmcache_connector.storage.redis.client.resp import command, first_line
from lmcache_connector.storage.redis.config import Value, ValuePlan
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 0.5
"""An owner that takes longer to reply is busy or stopped."""
_RELEASE_SECONDS = 0.05
_FAIR_SECONDS = 0.02
"""With less time left to a load, a time-out does not count against the owner."""
_RETRY_SECONDS, _NOT_OFFERED_SECONDS = 5.0, 60.0
_SECONDS_BETWEEN_LOOKS = 1.0
_BATCH_BYTES = 8 << 20
_MAX_BATCH_VALUES = 256
_SEALED = 0x2 | 0x4  # F_SEAL_SHRINK, F_SEAL_GROW: access to the mapping never faults
_F_GET_SEALS = 1034


class _NotOffered(Exception):
    """The peer does not offer its memory; its socket remains."""


class MappedPeers:
    """Reads from peers on this host. ``address_of(node)``: the path of the peer's socket, ``None``
    for a node elsewhere. Thread-safe. ``num_failed``: reads that ended with an error.

    A mapping keeps the owner's memory allocated even after the owner has died. A thread, started
    with the first mapping, closes such mappings, so that a restarted owner finds memory."""

    def __init__(
        self,
        plan: ValuePlan,
        address_of: Callable[[str], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._address_of = address_of
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Mapping]] = {}
        self._not_before: dict[str, float] = {}
        self._closing = threading.Event()
        self._looking: threading.Thread | None = None
        self.num_failed = 0

    def read(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], node: str, limit: Deadline
    ) -> list[bool]:
        """Per chunk: whether it was copied and verified. Use the socket for the others."""
        hits, address = [False] * len(keys), self._address_of(node)
        if address is None or self.is_silent(node):
            return hits
        is_late = limit.remaining() < _FAIR_SECONDS
        try:
            with self._mapping(node, address, limit) as mapping:
                mapping.read(self._plan, keys, buffers, limit, hits)
        except _NotOffered:
            self._back_off(node, _NOT_OFFERED_SECONDS)
        except (WireError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: no thread
            self.num_failed += 1
            logger.debug("The memory of %s cannot be read: %s", node, error)
            is_late &= isinstance(error, TimeoutError | BlockingIOError)  # no time left to wait
            is_late |= isinstance(error, WireError) and not error.is_peers_fault
            if not is_late:
                self._back_off(node, _RETRY_SECONDS)
        return hits

    def is_silent(self, node: str) -> bool:
        """Whether the node's memory is not read for now, because mapping or reading it failed."""
        return self._clock() < self._not_before.get(node, 0.0)

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            idle, self._idle = self._idle, {}
        for mappings in idle.values():
            for mapping in mappings:
                mapping.close()

    def _back_off(self, node: str, seconds: float) -> None:
        now = self._clock()
        with self._lock:
            left = {other: at for other, at in self._not_before.items() if at > now}
            self._not_before = left | {node: now + seconds}

    @contextlib.contextmanager
    def _mapping(self, node: str, address: str, limit: Deadline) -> Iterator[_Mapping]:
        """A mapping for exclusive use, pooled afterwards; closed if its use fails."""
        with self._lock:
            if self._looking is None:
                self._looking = start_thread("lmc-mapped-peers", self._close_stale)
            idle = self._idle.get(node)
            mapping = idle.pop() if idle else None
        if mapping is not None and not mapping.is_fresh():
            mapping.close()  # the owner has died or restarted
            mapping = None
        mapping = mapping or _Mapping(address, _reply_deadline(limit))
        try:
            yield mapping
        except BaseException:
            mapping.close()
            raise
        try:
            mapping.release(_reply_deadline(limit, least=_RELEASE_SECONDS))
        except WireError:  # the copies are good; closing the connection ends the lease
            mapping.close()
            return
        with self._lock:
            if not self._closing.is_set():
                self._idle.setdefault(node, []).append(mapping)
                return
        mapping.close()

    def _close_stale(self) -> None:
        while not self._closing.wait(_SECONDS_BETWEEN_LOOKS):
            with self._lock:
                idle = [mapping for each in self._idle.values() for mapping in each]
                gone = [mapping for mapping in idle if not mapping.is_fresh()]
                kept = {n: [m for m in each if m not in gone] for n, each in self._idle.items()}
                self._idle = {node: each for node, each in kept.items() if each}
            for mapping in gone:
                mapping.close()


class _Mapping:
    """A connection to an owner, and its mapped memory. Methods raise ``OSError``, ``ValueError`` or
    ``WireError``; the constructor also `_NotOffered`. Replies must be complete by ``until``."""

    def __init__(self, address: str, until: Deadline) -> None:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(until.remaining())
            sock.connect(address)
            sock.sendall(command(b"MAP"))
            data, descriptors, _, _ = socket.recv_fds(sock, 64, 1)
            try:
                if not descriptors:
                    raise _NotOffered
                self._map = _mapped(descriptors[0])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._wire = Wire(sock, until.clock, _ANSWER_SECONDS)
            self._wire.unread(data)
            self._wire.receive_line(until)
        except BaseException:
            sock.close()
            raise
        self._memory = np.frombuffer(self._map, np.uint8)

    def is_fresh(self) -> bool:
        """Whether the connection is open, with nothing left to read."""
        return self._wire.is_fresh()

    def read(
        self,
        plan: ValuePlan,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        limit: Deadline,
        hits: list[bool],
    ) -> None:
        """Each batch is leased while the one before is copied. Sets the ``hits``."""
        num_left, leased = [len(plan.stripes_of(key)) for key in keys], list[Value]()
        chunks = enumerate(zip(keys, buffers, strict=True))
        values = chain.from_iterable(plan.values(i, *chunk) for i, chunk in chunks)
        sizes = _BATCH_BYTES, _MAX_BATCH_VALUES
        for batch in chain(batches(values, lambda value: len(value.payload), *sizes), [[]]):
            asked = batch if limit.remaining() > 0.0 else []
            until = _reply_deadline(limit)
            if asked:
                self._wire.send([command(b"LEASE", *(value.name for value in asked))], until)
            for value, place in zip(leased, self._places(len(leased), until), strict=True):
                num_left[value.chunk] -= self._copy(plan.sealer, value, *place)
                hits[value.chunk] = not num_left[value.chunk]
            leased = asked

    def _places(self, count: int, until: Deadline) -> Iterator[tuple[int, bytes]]:
        """Offset and header of each value of a ``LEASE``."""
        answer = bytearray(PLACE.size * count)
        if not count:
            return iter(())
        self._expect(b"$%d" % len(answer), until)
        self._wire.receive_behind([memoryview(answer)], until)
        self._expect(b"", until)
        return PLACE.iter_unpack(answer)

    def release(self, until: Deadline) -> None:
        """End the leases of the last two batches; each ``LEASE`` ends those of earlier ones."""
        self._wire.send([command(b"RELEASE")], until)
        self._expect(b"+OK", until)

    def close(self) -> None:
        self._wire.close()
        del self._memory
        self._map.close()

    def _copy(self, sealer: Sealer, value: Value, offset: int, header: bytes) -> bool:
        """False if the owner lacks the value or the copy fails verification."""
        size = len(value.payload)
        if offset == NOWHERE:
            return False
        if offset + size > len(self._memory):
            raise WireError(WireFault.OUT_OF_STEP, "an address outside the mapped memory")
        # numpy's copy releases the GIL, a memoryview's does not.
        np.copyto(np.frombuffer(value.payload, np.uint8), self._memory[offset : offset + size])
        try:
            check_value(header, value.payload, value.expected, sealer)
        except InvalidValueError:
            return False
        return True

    def _expect(self, wanted: bytes, until: Deadline) -> None:
        if (line := self._wire.receive_line(until)) != wanted:
            raise WireError(WireFault.OUT_OF_STEP, first_line(line))


def _reply_deadline(limit: Deadline, least: float = 0.001) -> Deadline:
    """Deadline of an owner's reply."""
    seconds = min(_ANSWER_SECONDS, max(least, limit.remaining()))
    return Deadline(limit.clock() + seconds, limit.clock)


def _mapped(descriptor: int) -> mmap.mmap:
    """Map read-only. Raises ``ValueError`` for a memfd whose size could change."""
    if fcntl.fcntl(descriptor, _F_GET_SEALS) & _SEALED != _SEALED:
        raise ValueError("memory whose size may change")
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ)
