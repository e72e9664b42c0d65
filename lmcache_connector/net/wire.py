"""Moves bytes over a connected socket, to or from its *peer*: a Redis server or another instance.

Waits are cut into slices, so that deadlines, cancellations and silent peers are noticed soon. In a
slice, one system call moves all available bytes, scattered over many buffers, without the GIL. On
plain sockets ``MSG_WAITALL`` with ``SO_RCVTIMEO`` does this; Python's socket time-outs would add a
poll for every few hundred KiB.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import ssl
import struct
import termios
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from lmcache_connector.net.deadline import Deadline

SLICE_SECONDS = 0.005
# Silence before a missed deadline that counts as the peer's fault, not as too tight a deadline.
_SUSPICIOUS_SECONDS = 0.2
_MAX_VECTORS = 512
_LOW_WATER_BYTES = 256 << 10
_LINE_BYTES = 64 * 1024
_TLS_RECORD_BYTES = 16 * 1024
# Bytes per slice, so that deadlines are checked with a fast peer too.
_TLS_SLICE_BYTES = 1 << 20
_INT = struct.Struct("@i")
_TIMEVAL = struct.Struct("@ll")


class WireFault(Enum):
    """Why a connection ended. The values are labels of a metric."""

    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    STALLED = "stalled"
    OUT_OF_STEP = "out_of_step"  # the bytes received are no answer to those sent


class WireError(Exception):
    """The connection is unusable. ``is_peers_fault`` is False if only the caller's own deadline or
    cancellation ended it.
    """

    def __init__(self, fault: WireFault, detail: str = "", *, is_peers_fault: bool = True) -> None:
        super().__init__(detail or fault.value)
        self.fault = fault
        self.is_peers_fault = is_peers_fault


_Move = Callable[[Sequence[memoryview], float], int]


class PlainChannel:
    """A TCP or Unix socket. Nobody else may set its options.

    Methods wait up to ``seconds`` and return the number of bytes moved. They raise ``OSError`` if
    the connection broke, ``EOFError`` if the peer closed it.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._timeouts: dict[int, float] = {}
        self._low_water = 1

    def receive(self, views: Sequence[memoryview], seconds: float, *, fill: bool) -> int:
        """``fill``: wait until ``views`` are full, but for the end that `_without_tail` leaves out,
        or ``seconds`` are over; else return as soon as bytes have arrived."""
        self._set_timeout(socket.SO_RCVTIMEO, seconds)
        try:
            if fill:
                views, low_water = _without_tail(views)
                self._set_low_water(low_water)
                count = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            else:
                self._set_low_water(1)
                count = self._sock.recv_into(views[0])
        except BlockingIOError:
            return 0
        if count == 0:
            raise EOFError
        return count

    def send(self, views: Sequence[memoryview], seconds: float) -> int:
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

    def _set_low_water(self, num_bytes: int) -> None:
        """Wake up only for ``num_bytes``. Over TCP this saves an eighth of a reader's time: by
        default it wakes up for every packet or two."""
        if num_bytes != self._low_water:
            self._low_water = num_bytes
            with contextlib.suppress(OSError):  # unsupported: stays 1
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


def _without_tail(views: Sequence[memoryview]) -> tuple[Sequence[memoryview], int]:
    """Large ``views`` without their last 256 KiB, and a low-water mark of 256 KiB: the bytes left
    out follow in the queue, which so reaches the mark. Small ``views`` whole, and a mark of 1."""
    left = sum(map(len, views)) - _LOW_WATER_BYTES
    if left < _LOW_WATER_BYTES:
        return views, 1
    first = []
    for view in views:
        first.append(view[:left])
        left -= len(first[-1])
        if not left:
            break
    return first, _LOW_WATER_BYTES


class TlsChannel:
    """As `PlainChannel`, over TLS: one record (16 KiB) per system call, and no scattering."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def receive(self, views: Sequence[memoryview], seconds: float, *, fill: bool) -> int:
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
                if not fill or received >= _TLS_SLICE_BYTES:
                    return received
        return received

    def send(self, views: Sequence[memoryview], seconds: float) -> int:
        # One record at a time: of a longer write, a time-out would hide how much was sent.
        view, sent = views[0], 0
        self._sock.settimeout(seconds)
        while sent < min(len(view), _TLS_SLICE_BYTES):
            try:
                sent += self._sock.send(view[sent : sent + _TLS_RECORD_BYTES])
            except TimeoutError:
                break
        return sent


class Wire:
    """A connection to one peer. Not thread-safe: one thread owns it.

    ``clock`` returns seconds. ``idle_seconds``: limit for the peer to move ``idle_bytes``, or a
    whole line.
    """

    def __init__(
        self,
        sock: socket.socket,
        clock: Callable[[], float],
        idle_seconds: float,
        idle_bytes: int = 1,
    ) -> None:
        self._sock = sock
        self._channel: PlainChannel | TlsChannel = (
            TlsChannel(sock) if isinstance(sock, ssl.SSLSocket) else PlainChannel(sock)
        )
        self._receive_any: _Move = partial(self._channel.receive, fill=False)
        self._fill: _Move = partial(self._channel.receive, fill=True)
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._idle_bytes = idle_bytes
        self._line_buffer = bytearray()
        self._line_scratch = memoryview(bytearray(_LINE_BYTES))
        self.round_trip_seconds = 0.0
        """Set by the owner: seconds from the last awaited command to its reply."""

    def receive(
        self,
        views: Sequence[memoryview],
        deadline: Deadline,
        on_pause: Callable[[int], None] = lambda received: None,
    ) -> None:
        """Fill ``views``. Raises `WireError`. After each incomplete slice, ``on_pause`` is called
        with the number of bytes received so far; it may raise to give up.
        """
        if self._line_buffer:
            raise WireError(WireFault.OUT_OF_STEP, "unexpected bytes")
        pending = _Pending(views)
        silence = self._silence()
        # Return with the first bytes: they may be an error, with nothing behind them.
        move = self._receive_any
        while pending.views:
            count = self._slice(move, pending.head(), deadline, silence)
            pending.advance(count)
            if count:
                move = self._fill
            if pending.views:
                on_pause(pending.done)

    def send(self, views: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """Send all of ``views``, without joining them. Raises `WireError`."""
        pending = _Pending([memoryview(view) for view in views])
        silence = self._silence()
        while pending.views:
            pending.advance(self._slice(self._channel.send, pending.head(), deadline, silence))

    def receive_behind(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill ``views`` with the bytes behind the last line. Raises `WireError`."""
        pending = _Pending(views)
        silence = self._silence()
        while pending.views:
            if self._line_buffer:
                pending.advance(self._take_buffered(pending.views[0]))
            else:
                pending.advance(self._slice(self._fill, pending.head(), deadline, silence))

    def unread(self, data: bytes) -> None:
        """Put back bytes that `receive` has received, for `receive_line` and `receive_behind`."""
        self._line_buffer[:0] = data

    def receive_line(self, deadline: Deadline, max_bytes: int = _LINE_BYTES) -> bytes:
        """Receive one line and return it without its CRLF. Raises `WireError`.

        Receives at most ``max_bytes`` at once; bytes behind the line are buffered. The whole line
        must arrive within ``idle_seconds``. While bytes sent before are on their way, the peer
        cannot answer: whenever it has taken ``idle_bytes`` of them, or the last, the time restarts.
        """
        silence = _Silence(self._clock, self._idle_seconds, float("inf"))
        unsent = self._num_unsent()
        while (line := self.next_line()) is None:
            self._buffer_more(deadline, silence, max_bytes)
            if unsent and (left := self._num_unsent()) <= max(0, unsent - self._idle_bytes):
                unsent, silence = left, silence.again()
        return line

    def next_line(self) -> bytes | None:
        """An already received line, without its CRLF, or ``None``. Raises `WireError`."""
        end = self._line_buffer.find(b"\r\n")
        if end < 0:
            if len(self._line_buffer) > _LINE_BYTES:
                raise WireError(WireFault.OUT_OF_STEP, "a line that is too long")
            return None
        line = bytes(self._line_buffer[:end])
        del self._line_buffer[: end + 2]
        return line

    def receive_some(self, deadline: Deadline) -> None:
        """Receive available bytes, for `next_line`. Raises `WireError`."""
        self._buffer_more(deadline, self._silence())

    def has_received(self) -> bool:
        """Whether there are decrypted bytes, which a poll of the socket does not show."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def is_fresh(self) -> bool:
        """Whether an idle connection is open, with nothing left to read."""
        if self._line_buffer:
            return False
        if self.has_received():
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        # Readable would mean end of file or unrequested bytes.
        return not poll.poll(0)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _num_unsent(self) -> int:
        """Bytes in the socket's send queue; 0 if the system does not tell."""
        with contextlib.suppress(OSError):
            answer = fcntl.ioctl(self._sock, termios.TIOCOUTQ, _INT.pack(0))
            return int(_INT.unpack(answer)[0])
        return 0

    def _silence(self) -> _Silence:
        return _Silence(self._clock, self._idle_seconds, self._idle_bytes)

    def _take_buffered(self, view: memoryview) -> int:
        count = min(len(view), len(self._line_buffer))
        view[:count] = self._line_buffer[:count]
        del self._line_buffer[:count]
        return count

    def _buffer_more(
        self, deadline: Deadline, silence: _Silence, max_bytes: int = _LINE_BYTES
    ) -> None:
        place = self._line_scratch[:max_bytes]
        count = self._slice(self._receive_any, [place], deadline, silence)
        self._line_buffer += self._line_scratch[:count]

    def _slice(
        self, move: _Move, views: Sequence[memoryview], deadline: Deadline, silence: _Silence
    ) -> int:
        remaining = deadline.remaining()
        if remaining <= 0.0:
            if deadline.cancelled():
                raise WireError(WireFault.CANCELLED, is_peers_fault=False)
            is_silent = silence.seconds() > _SUSPICIOUS_SECONDS
            raise WireError(WireFault.DEADLINE, is_peers_fault=is_silent)
        try:
            count = move(views, min(SLICE_SECONDS, remaining))
        except EOFError:
            raise WireError(WireFault.CLOSED, "the peer closed the connection") from None
        except OSError as error:
            raise WireError(WireFault.CLOSED, f"connection broken: {error.strerror}") from error
        silence.count_bytes(count)
        return count


def wait_readable(wires: Sequence[Wire], seconds: float) -> list[Wire]:
    """Wires with bytes or end of file to receive; empty after ``seconds``."""
    if ready := [wire for wire in wires if wire.has_received()]:
        return ready
    poll, by_number = select.poll(), {wire.fileno(): wire for wire in wires}
    for number in by_number:
        poll.register(number, select.POLLIN)
    millis = max(1, round(1e3 * seconds)) if seconds else 0
    return [by_number[number] for number, _ in poll.poll(millis)]


class _Silence:
    """Measures how long fewer than ``least`` bytes have moved; raises `WireError` after
    ``limit``."""

    def __init__(self, clock: Callable[[], float], limit: float, least: float) -> None:
        self._clock = clock
        self._limit = limit
        self._least = least
        self._moved = 0
        self._since = clock()

    def again(self) -> _Silence:
        """A new measurement from now on."""
        return _Silence(self._clock, self._limit, self._least)

    def seconds(self) -> float:
        return self._clock() - self._since

    def count_bytes(self, count: int) -> None:
        self._moved += count
        if self._moved >= self._least:
            self._since, self._moved = self._clock(), 0
        elif self.seconds() >= self._limit:
            detail = f"{self._moved} bytes" if self._moved else "no byte"
            raise WireError(WireFault.STALLED, f"{detail} in {self._limit:g} s")


class _Pending:
    """The views left to fill or send, and the number of bytes done."""

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
