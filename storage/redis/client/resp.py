"""The parts of RESP2 that the tier implements itself (pure)."""

from __future__ import annotations

from enum import Enum

from lmcache_connector.net.wire import WireFault

CRLF = b"\r\n"
_MAX_DIGITS = 20


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
    """Whether a cluster node replies that the key is, or will soon be, on another node."""
    return line.startswith((b"-MOVED ", b"-ASK ", b"-TRYAGAIN", b"-CLUSTERDOWN"))
