"""The parts of RESP2 that tiers and peer servers implement themselves, without I/O."""

from __future__ import annotations

from enum import Enum

from lmcache_connector.net.wire import WireFault

CRLF = b"\r\n"
_MAX_DIGITS = 20
_MAX_LENGTH_LINE = 32
MAX_COMMAND_BYTES = 1 << 18
MAX_WORDS = 2_500
"""Words in one command: enough for the names of 128 heads in 19 stripes each."""


class ReplyFault(Enum):
    """Kinds of well-formed replies that are not the requested value."""

    MISSING = "missing"
    ERROR_REPLY = "error_reply"
    WRONG_LENGTH = "wrong_length"
    WRONG_TYPE = "wrong_type"


def command(*parts: bytes) -> bytes:
    """One command as an array of bulk strings."""
    bulks = (b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n" % len(parts) + b"".join(bulks)


def set_command(key: bytes, value_bytes: int, options: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    """The bytes before and after the value of a SET."""
    name = b"$3\r\nSET\r\n$%d\r\n%b\r\n" % (len(key), key)
    head = b"*%d\r\n%b$%d\r\n" % (3 + len(options), name, value_bytes)
    tail = b"".join(b"\r\n$%d\r\n%b" % (len(option), option) for option in options)
    return head, tail + CRLF


def bulk_line(num_bytes: int) -> bytes:
    """The line that announces a bulk string."""
    return b"$%d\r\n" % num_bytes


def bulk_length(line: bytes) -> int | None:
    """The length in a bulk line without its CRLF; None for any other line."""
    digits = line[1:]
    if line[:1] != b"$" or not digits.isdigit() or len(digits) > _MAX_DIGITS:
        return None
    return int(digits)


def classify_mismatch(head: bytes) -> ReplyFault | WireFault:
    """Classify a reply that does not begin with the expected bulk line."""
    if head.startswith(b"$-1\r"):
        return ReplyFault.MISSING
    if head.startswith(b"-WRONGTYPE"):
        return ReplyFault.WRONG_TYPE
    if head.startswith(b"-"):
        return ReplyFault.ERROR_REPLY
    if head.startswith(b"$") and head[1:2].isdigit():
        return ReplyFault.WRONG_LENGTH
    return WireFault.OUT_OF_STEP


def first_line(reply: bytes) -> str:
    """The first line of a reply, cut and made printable for a log."""
    return reply.split(CRLF, 1)[0][:200].decode("ascii", "backslashreplace")


def is_redirection(line: bytes) -> bool:
    """Whether a cluster node replies that the key is, or will soon be, elsewhere, or nowhere. A
    node that serves no key at all sends ``CLUSTERDOWN`` too, with another text."""
    return line.startswith((b"-MOVED ", b"-ASK ", b"-TRYAGAIN", b"-CLUSTERDOWN Hash slot"))


class ProtocolError(Exception):
    """The client violates RESP2 or a size limit. The message is sent to the client."""


class CommandParser:
    """Splits a byte stream into commands (RESP2 arrays of bulk strings), within size limits."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._place = 0  # end of the words parsed so far
        self._words: list[bytes] = []
        self._num_left = 0

    def feed(self, data: bytes) -> None:
        self._received += data

    @property
    def num_bytes(self) -> int:
        """Buffered bytes of incomplete or untaken commands."""
        return len(self._received)

    def next(self) -> list[bytes] | None:
        """The next complete command, or ``None``. Raises :class:`ProtocolError` if malformed."""
        while not self._num_left:
            if (num_words := self._length(b"*", MAX_WORDS)) is None:
                return None
            self._num_left = num_words
        while self._num_left:
            before = self._place
            if (num_bytes := self._length(b"$", MAX_COMMAND_BYTES)) is None:
                return None
            end = self._place + num_bytes
            if end + len(CRLF) > MAX_COMMAND_BYTES:
                raise ProtocolError("a command that is too long")
            if len(self._received) < end + len(CRLF):
                self._place = before
                return None
            if self._received[end : end + len(CRLF)] != CRLF:
                raise ProtocolError("a string that does not have its announced length")
            self._words.append(bytes(self._received[self._place : end]))
            self._place = end + len(CRLF)
            self._num_left -= 1
        words, self._words = self._words, []
        del self._received[: self._place]
        self._place = 0
        return words

    def _length(self, kind: bytes, most: int) -> int | None:
        """Take the number in the next line; ``None`` if the line is incomplete. May raise."""
        start, limit = self._place, self._place + _MAX_LENGTH_LINE
        if len(self._received) > start and self._received[start] != kind[0]:
            raise ProtocolError("no command")
        end = self._received.find(CRLF, start, limit)
        if end < 0:
            if len(self._received) >= limit:
                raise ProtocolError("a line that is too long")
            return None
        self._place = end + len(CRLF)
        number = bulk_length(b"$" + self._received[start + 1 : end])
        if number is None or number > most:
            raise ProtocolError("a malformed or excessive length")
        return number
