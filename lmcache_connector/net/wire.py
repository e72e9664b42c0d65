"""Bytes to and from a server over a socket that redis-py has connected and authenticated.

Waits are cut into slices so that a deadline, a cancellation or a silent server is noticed soon;
inside a slice one system call moves as much as there is, scattered over many buffers, with the GIL
released. On a plain socket ``MSG_WAITALL`` with ``SO_RCVTIMEO`` does that: Python's own socket
timeouts would turn every few hundred KiB into a poll and a receive.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from lmcache_connector.net.deadline import Deadline

SLICE_SECONDS = 0.005
# A deadline that passes after as long without a byte was not just too tight.
_SUSPICIOUS_SECONDS = 0.2
_MAX_VECTORS = 512
_LINE_BYTES = 64 * 1024
_TIMEVAL = struct.Struct("@ll")


class WireError(Exception):
    """The connection is of no more use. ``reason`` names the counter it goes to;
    ``is_servers_fault`` is false where only the caller's own hurry ended it."""

    def __init__(self, reason: str, detail: str = "", *, is_servers_fault: bool = True) -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.is_servers_fault = is_servers_fault


_Move = Callable[[Sequence[memoryview], float], int]


class Channel(Protocol):
    """One slice of sending or receiving. All return the bytes moved, 0 when the slice ended with
    none, and raise ``OSError`` on a broken connection, ``EOFError`` on one closed by the peer."""

    def receive_some(self, views: Sequence[memoryview], seconds: float) -> int:
        """Wait until all of ``views`` is full, or the slice is over."""
        ...

    def receive_available(self, view: memoryview, seconds: float) -> int:
        """Be content with whatever comes first."""
        ...

    def send_some(self, views: Sequence[memoryview], seconds: float) -> int: ...


class PlainChannel:
    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._timeouts: dict[int, float] = {}

    def receive_some(self, views: Sequence[memoryview], seconds: float) -> int:
        self._set_timeout(socket.SO_RCVTIMEO, seconds)
        try:
            count = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            return 0
        if count == 0:
            raise EOFError
        return count

    def receive_available(self, view: memoryview, seconds: float) -> int:
        self._set_timeout(socket.SO_RCVTIMEO, seconds)
        try:
            count = self._sock.recv_into(view)
        except BlockingIOError:
            return 0
        if count == 0:
            raise EOFError
        return count

    def send_some(self, views: Sequence[memoryview], seconds: float) -> int:
        self._set_timeout(socket.SO_SNDTIMEO, seconds)
        try:
            return self._sock.sendmsg(views)
        except BlockingIOError:
            return 0

    def _set_timeout(self, option: int, seconds: float) -> None:
        if self._timeouts.get(option) != seconds:
            # Zero would mean forever.
            micros = max(1000, int(seconds * 1e6))
            self._sock.setsockopt(
                socket.SOL_SOCKET, option, _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
            )
            self._timeouts[option] = seconds


class TlsChannel:
    """TLS moves at most one record (16 KiB) per call; OpenSSL leaves nothing to scatter."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def receive_some(self, views: Sequence[memoryview], seconds: float) -> int:
        received = 0
        self._sock.settimeout(seconds)
        for view in views:
            done = 0
            while done < len(view):
                try:
                    count = self._sock.recv_into(view[done:])
                except TimeoutError:
                    return received
                if count == 0:
                    if received:
                        return received
                    raise EOFError
                done += count
                received += count
        return received

    def receive_available(self, view: memoryview, seconds: float) -> int:
        self._sock.settimeout(seconds)
        try:
            count = self._sock.recv_into(view)
        except TimeoutError:
            return 0
        if count == 0:
            raise EOFError
        return count

    def send_some(self, views: Sequence[memoryview], seconds: float) -> int:
        self._sock.settimeout(seconds)
        try:
            return self._sock.send(views[0])
        except TimeoutError:
            return 0


class Wire:
    """A connection to one server. Not thread-safe: one thread owns it.

    ``idle_seconds`` bounds how long the server may go without moving a single byte.
    """

    def __init__(
        self, sock: socket.socket, clock: Callable[[], float], idle_seconds: float
    ) -> None:
        self._sock = sock
        self._channel: Channel = (
            TlsChannel(sock) if isinstance(sock, ssl.SSLSocket) else PlainChannel(sock)
        )
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._line_buffer = bytearray()
        self._line_scratch = memoryview(bytearray(_LINE_BYTES))

    def receive(
        self,
        views: Sequence[memoryview],
        deadline: Deadline,
        on_pause: Callable[[int], None] = lambda received: None,
    ) -> None:
        """Fill ``views``. ``on_pause(received)`` is told, whenever a slice ends early, how many
        bytes are there, and may raise to give up. Raises `WireError`."""
        if self._line_buffer:
            raise WireError("out_of_step", "bytes nobody asked for")
        pending = _Pending(views)
        silence = _Silence(self._clock, self._idle_seconds)
        # The first bytes are looked at as soon as they are there: they may be all there is.
        move: _Move = self._receive_available
        while pending.views:
            count = self._slice(move, pending.head(), deadline, silence)
            pending.advance(count)
            if count:
                move = self._channel.receive_some
            if pending.views:
                on_pause(pending.done)

    def send(self, views: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """Send all of ``views`` without copying them together. Raises `WireError`."""
        pending = _Pending([memoryview(view) for view in views])
        silence = _Silence(self._clock, self._idle_seconds)
        while pending.views:
            pending.advance(self._slice(self._channel.send_some, pending.head(), deadline, silence))

    def receive_line(self, deadline: Deadline) -> bytes:
        """One reply that is a single line, without its line end. Raises `WireError`."""
        silence = _Silence(self._clock, self._idle_seconds)
        while (end := self._line_buffer.find(b"\r\n")) < 0:
            if len(self._line_buffer) > _LINE_BYTES:
                raise WireError("out_of_step", "a line without end")
            count = self._slice(self._receive_available, [self._line_scratch], deadline, silence)
            self._line_buffer += self._line_scratch[:count]
        line = bytes(self._line_buffer[:end])
        del self._line_buffer[: end + 2]
        return line

    def is_fresh(self) -> bool:
        """Whether an idle connection is still open and owes nothing."""
        if self._line_buffer:
            return False
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        # Whatever there is to read, an end of file or bytes nobody asked for, is bad news.
        return not poll.poll(0)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # already gone, which is what is wanted
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _receive_available(self, views: Sequence[memoryview], seconds: float) -> int:
        return self._channel.receive_available(views[0], seconds)

    def _slice(
        self,
        move: _Move,
        views: Sequence[memoryview],
        deadline: Deadline,
        silence: _Silence,
    ) -> int:
        remaining = deadline.remaining()
        if remaining <= 0.0:
            cancelled = deadline.cancelled()
            raise WireError(
                "cancelled" if cancelled else "deadline",
                is_servers_fault=not cancelled and silence.seconds() > _SUSPICIOUS_SECONDS,
            )
        try:
            count = move(views, min(SLICE_SECONDS, remaining))
        except EOFError:
            raise WireError("closed", "the server closed the connection") from None
        except OSError as error:
            raise WireError("closed", f"connection broken: {error.strerror}") from error
        silence.heard(count)
        return count


class _Silence:
    """Raises when no byte has moved for too long."""

    def __init__(self, clock: Callable[[], float], limit: float) -> None:
        self._clock = clock
        self._limit = limit
        self._since = clock()

    def seconds(self) -> float:
        return self._clock() - self._since

    def heard(self, count: int) -> None:
        if count:
            self._since = self._clock()
        elif self.seconds() >= self._limit:
            raise WireError("stalled", f"no byte for {self._limit:g} s")


class _Pending:
    """Views of which a growing part is done."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = [view for view in views if len(view)]
        self.done = 0

    def head(self) -> Sequence[memoryview]:
        return self.views[:_MAX_VECTORS]

    def advance(self, count: int) -> None:
        self.done += count
        index = 0
        while index < len(self.views) and count >= len(self.views[index]):
            count -= len(self.views[index])
            index += 1
        del self.views[:index]
        if count:
            self.views[0] = self.views[0][count:]
