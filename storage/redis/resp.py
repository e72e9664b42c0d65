"""The few bytes of the RESP2 protocol that the bulk data path speaks itself (pure)."""

from __future__ import annotations

CRLF = b"\r\n"


def command(*parts: bytes) -> bytes:
    """One command as an array of bulk strings."""
    bulks = (b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n" % len(parts) + b"".join(bulks)


def set_command(key: bytes, value_bytes: int, options: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    """A SET cut open around its value: what goes before it, and what goes after."""
    name = b"$3\r\nSET\r\n$%d\r\n%b\r\n" % (len(key), key)
    head = b"*%d\r\n%b$%d\r\n" % (3 + len(options), name, value_bytes)
    tail = b"".join(b"\r\n$%d\r\n%b" % (len(option), option) for option in options)
    return head, tail + CRLF


def bulk_line(num_bytes: int) -> bytes:
    """The line that announces a bulk string."""
    return b"$%d\r\n" % num_bytes


def describe_mismatch(head: bytes) -> str:
    """Why a reply that should have begun with another bulk line is none: a counter's name."""
    if head.startswith(b"$-1\r"):
        return "missing"
    if head.startswith(b"-"):
        return "error_reply"
    if head.startswith(b"$") and head[1:2].isdigit():
        return "wrong_length"
    return "out_of_step"


def first_line(reply: bytes) -> str:
    """For a log: the first line of a reply, cut and made printable."""
    return reply.split(CRLF, 1)[0][:200].decode("ascii", "backslashreplace")


def is_redirection(line: bytes) -> bool:
    """Whether a cluster says that the key lives, or will soon live, elsewhere."""
    return line.startswith((b"-MOVED ", b"-ASK ", b"-TRYAGAIN", b"-CLUSTERDOWN"))
