"""The data plane through NIXL: the receiver reads the payload out of the sender's memory.

A connection is the TCP transport's (:mod:`lmcache_connector.p2p.data.tcp`), which proves its
session and carries the heads of frames. The sender begins it with what a peer needs to read its
memory, tagged with the connection's key. Behind each head it says where the payload lies::

    sender    metadata: length u32 | bytes | tag 32s                     once
              count u32 | (address u64 | length u64) * count | tag 32s   behind a head
    receiver  b"?"  I am still reading         sender  b"!"
              b"R"  I have read it             sender  b"C"  it was there until now
              b"I"  send it here               sender  the payload
              b"S"  nobody wants it

A ``count`` of 0: the payload follows here, without a tag, as its memory is not registered. Else
there are as many places as the frame has heads, of their sizes. Nothing counts as received before
the sender's ``b"C"``, so what it gave up and used anew is never taken for KV.
"""

from __future__ import annotations

import hmac
import logging
import struct
from collections.abc import Callable, Sequence

import numpy as np
from blake3 import blake3

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError
from lmcache_connector.p2p.data.nixl_agent import MAX_METADATA_BYTES, Nixl, Runs, runs_of
from lmcache_connector.p2p.data.tcp import TcpTransport, WirePath, no_deadline
from lmcache_connector.p2p.errors import PeerError, ReadError
from lmcache_connector.p2p.reasons import Reason

logger = logging.getLogger(__name__)

_SIZE = struct.Struct("<I")
_TAG_BYTES = 32
_MAX_RUNS = 1 << 16
_STILL_READING, _STILL_HERE = b"?", b"!"
_READ, _SEND_IT, _SKIP = b"R", b"I", b"S"
_CONFIRMED = b"C"


class NixlTransport(TcpTransport):
    """``nixl``: with the memory that frames leave from and land in."""

    def __init__(self, nixl: Nixl, stall_seconds: float, clock: Callable[[], float]) -> None:
        super().__init__(stall_seconds, clock)
        self.name = "nixl"
        self._nixl = nixl

    def close(self, seconds: float) -> None:
        super().close(seconds)
        self._nixl.close(seconds)

    def _sending_path(self, wire: Wire, key: bytes) -> _NixlPath:
        path = self._path(wire, key)
        metadata = self._nixl.metadata()
        try:
            wire.send([_SIZE.pack(len(metadata)), metadata, path.tag(metadata)], path.soon())
        except WireError as error:
            raise PeerError(f"NIXL was not introduced: {error}", Reason.LOST) from error
        return path

    def _receiving_path(self, wire: Wire, key: bytes) -> _NixlPath:
        path = self._path(wire, key)
        (size,) = _SIZE.unpack(path.take(_SIZE.size))
        if size > MAX_METADATA_BYTES:
            raise PeerError(f"NIXL metadata of {size} bytes is not believed", Reason.PROTOCOL)
        path.metadata = path.take_tagged(size)
        return path

    def _path(self, wire: Wire, key: bytes) -> _NixlPath:
        return _NixlPath(wire, key, self._nixl, self._stall_seconds, self._clock)


class _NixlPath:
    """``metadata``: the sender's; none once its memory could not be read. Belongs to one thread."""

    def __init__(
        self,
        wire: Wire,
        key: bytes,
        nixl: Nixl,
        stall_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._wire = wire
        self._key = key
        self._num_tags = 0
        self._inline = WirePath(wire, clock)
        self._nixl = nixl
        self._stall_seconds = stall_seconds
        self._clock = clock
        self.metadata = b""

    def soon(self) -> Deadline:
        """For what the peer says at once."""
        return Deadline(self._clock() + self._stall_seconds, self._clock)

    def take(self, num_bytes: int) -> bytes:
        """What the peer owes."""
        data = bytearray(num_bytes)
        self._wire.receive([memoryview(data)], self.soon())
        return bytes(data)

    def tag(self, data: bytes) -> bytes:
        """Of the next bytes on this connection that have one."""
        self._num_tags += 1
        return blake3(b"nixl %d " % self._num_tags + data, key=self._key).digest()

    def take_tagged(self, num_bytes: int) -> bytes:
        """What the peer owes, as it was sent. Raises ``PeerError``."""
        data, tag = self.take(num_bytes), self.take(_TAG_BYTES)
        if not hmac.compare_digest(tag, self.tag(data)):
            raise PeerError("bytes that the peer did not send so", Reason.PROTOCOL)
        return data

    # -- the sender ----------------------------------------------------------------------------

    def send(self, head: bytes, views: Sequence[memoryview]) -> None:
        runs = runs_of(views)
        if len(runs) > _MAX_RUNS or not self._nixl.covers(runs):
            self._inline.send(head + _SIZE.pack(0), views)
            return
        self._nixl.wake()
        places = runs.astype("<u8").tobytes()
        said = [head, _SIZE.pack(len(runs)), places, self.tag(places)]
        self._wire.send(said, no_deadline(self._clock))
        while (answer := self.take(1)) == _STILL_READING:
            self._nixl.wake()
            self._wire.send([_STILL_HERE], self.soon())
        if answer == _READ:
            self._wire.send([_CONFIRMED], self.soon())
        elif answer == _SEND_IT:
            self._wire.send(views, no_deadline(self._clock))
        elif answer != _SKIP:
            raise PeerError("the receiver of a frame said something else", Reason.PROTOCOL)

    # -- the receiver --------------------------------------------------------------------------

    def receive(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        local = runs_of(views)
        remote = self._places(len(local))
        if remote is None:
            self._inline.receive(views, deadline)
        elif self._can_read(local, remote, deadline):
            self._wire.send([_READ], self.soon())
            if self.take(1) != _CONFIRMED:
                raise PeerError("a frame that was not confirmed", Reason.PROTOCOL)
        else:
            self._wire.send([_SEND_IT], self.soon())
            self._inline.receive(views, deadline)

    def discard(self, num_bytes: int, deadline: Deadline) -> None:
        if self._places(_MAX_RUNS) is None:
            self._inline.discard(num_bytes, deadline)
        else:
            self._wire.send([_SKIP], self.soon())

    def close(self) -> None:
        if self.metadata:
            self._nixl.forget(self.metadata)
        self.metadata = b""

    def _can_read(self, local: Runs, remote: Runs, deadline: Deadline) -> bool:
        """Whether it is there now."""
        if not self.metadata or not self._nixl.covers(local):
            return False
        try:
            self._nixl.read(self.metadata, local, remote, lambda: self._go_on(deadline))
        except ReadError as error:
            logger.warning("Frames bring their payload from now on: %s", error)
            self.close()
            return False
        return True

    def _places(self, max_count: int) -> Runs | None:
        (count,) = _SIZE.unpack(self.take(_SIZE.size))
        if count > max_count:
            raise PeerError(f"a frame in {count} places is not believed", Reason.PROTOCOL)
        if not count:
            return None
        return np.frombuffer(self.take_tagged(16 * count), "<u8").astype(np.uint64).reshape(-1, 2)

    def _go_on(self, deadline: Deadline) -> None:
        """Whether the sender is still there."""
        if deadline.cancelled():
            raise PeerError("the transport is shutting down", Reason.SHUTDOWN)
        try:
            self._wire.send([_STILL_READING], self.soon())
            if self.take(1) != _STILL_HERE:
                raise PeerError("the sender of a frame said something else", Reason.PROTOCOL)
        except WireError as error:
            raise PeerError(f"the sender of a frame is silent: {error}", Reason.LOST) from error
