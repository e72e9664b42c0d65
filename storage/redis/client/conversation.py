"""Questions and whole answers, over one connection, within bounds.

Nothing that a server sends is believed: the size of a reply, what it holds and how long it may take
are bounded before anything is allocated or waited for. Memory grows only with bytes that came.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault
from lmcache_connector.storage.redis.client.resp import CRLF, first_line

_INTEGER = re.compile(rb"-?[0-9]{1,18}")
_MAX_DEPTH = 6
# A peer that moves less than that in a time-out is as good as silent.
IDLE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as a server words it, e.g. ``NOPERM ...``."""

    line: bytes

    def __str__(self) -> str:
        return first_line(self.line)

    def is_a(self, *codes: bytes) -> bool:
        """Whether the error begins with one of these words."""
        return self.line.split(b" ", 1)[0] in codes


Reply = bytes | int | ErrorReply | list["Reply"] | None


class RefusedError(Exception):
    """The server answered with the error ``reply`` where it had to agree."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(str(reply))
        self.reply = reply


@dataclass(frozen=True, slots=True)
class ReplyLimits:
    """Of one reply: its bytes on the wire, and its elements in all nested arrays together."""

    num_bytes: int = 64 << 10
    num_items: int = 256


SMALL = ReplyLimits()


class Conversation:
    """Owns ``sock``, which is connected. One thread uses it.

    ``seconds`` bounds each question with all its answers, ``clock`` returns seconds.
    """

    def __init__(self, sock: socket.socket, seconds: float, clock: Callable[[], float]) -> None:
        self._sock = sock
        self._wire = Wire(sock, clock, seconds, IDLE_BYTES)
        self._seconds = seconds
        self._clock = clock

    def ask(
        self, *commands: bytes, limits: ReplyLimits = SMALL, seconds: float | None = None
    ) -> list[Reply]:
        """The reply to each of the encoded ``commands``, in one round trip.

        ``limits`` holds for each reply. Raises `WireError`: then the connection is of no more use.
        """
        allowed = self._seconds if seconds is None else seconds
        deadline = Deadline(self._clock() + allowed, self._clock)
        self._wire.send([b"".join(commands)], deadline)
        return [receive_reply(self._wire, limits, deadline) for _ in commands]

    def take_socket(self) -> socket.socket:
        """The socket, for another owner. Raises `WireError` if it is not in step any more."""
        if not self._wire.is_fresh():
            raise WireError(WireFault.OUT_OF_STEP, "closed, or bytes that nobody asked for")
        return self._sock

    def close(self) -> None:
        self._wire.close()


def receive_reply(wire: Wire, limits: ReplyLimits, deadline: Deadline) -> Reply:
    """The next reply on ``wire``. Raises `WireError`."""
    return _Receiver(wire, limits, deadline).receive()


class _Receiver:
    """Receives one reply and counts what it holds."""

    def __init__(self, wire: Wire, limits: ReplyLimits, deadline: Deadline) -> None:
        self._wire = wire
        self._deadline = deadline
        self._bytes_left = limits.num_bytes
        self._items_left = limits.num_items

    def receive(self, depth: int = 0) -> Reply:
        line = self._wire.receive_line(self._deadline)
        self._spend(len(line))
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(rest)
        if kind not in (b":", b"$", b"*") or not _INTEGER.fullmatch(rest):
            raise WireError(WireFault.OUT_OF_STEP, first_line(line))
        number = int(rest)
        if kind == b":":
            return number
        if number < 0:
            return None
        return self._bulk(number) if kind == b"$" else self._array(number, depth)

    def _bulk(self, num_bytes: int) -> bytes:
        self._spend(num_bytes)
        data = self._wire.receive_bytes(num_bytes + len(CRLF), self._deadline)
        if not data.endswith(CRLF):
            raise WireError(WireFault.OUT_OF_STEP, "a bulk string without an end")
        return data[: -len(CRLF)]

    def _array(self, num_items: int, depth: int) -> list[Reply]:
        self._items_left -= num_items
        if self._items_left < 0 or depth >= _MAX_DEPTH:
            raise WireError(WireFault.OUT_OF_STEP, "an array that is too large")
        return [self.receive(depth + 1) for _ in range(num_items)]

    def _spend(self, num_bytes: int) -> None:
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise WireError(WireFault.OUT_OF_STEP, "a reply that is too long")
