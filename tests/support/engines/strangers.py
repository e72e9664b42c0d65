"""Strangers at an engine's ports: find the ports, send anything there, see what that costs."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_LISTENS = "0A"
_PATIENCE_SECONDS = 0.1
_HUGE = 2**62


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


SAYINGS: dict[str, bytes] = {
    "nothing": b"",
    "noise": bytes(range(256)) * 64,
    "lengths": struct.pack("<8Q", *[_HUGE] * 8) + struct.pack(">8Q", *[_HUGE] * 8),
    "half a command": b"*2\r\n$6\r\nEXISTS\r\n$90\r\nlmc:{",
    "an array without end": b"*2147483647\r\n" + b"$1\r\nx\r\n" * 64,
    "a string without end": b"*2\r\n$3\r\nGET\r\n$4611686018427387904\r\n" + b"x" * 4096,
    "writes": _command(b"SET", b"x", b"y") + _command(b"FLUSHALL") + _command(b"DEL", b"x"),
    "settings": _command(b"CONFIG", b"SET", b"dir", b"/") + _command(b"SHUTDOWN"),
    "questions": _command(b"PING") * 4096,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


def ports_of(pid: int) -> list[int]:
    """TCP ports on which a process listens."""
    inodes = set()
    for name in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(name.readlink()))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def talk(port: int, said: bytes, times: int = 1) -> int:
    """Send ``said`` on ``times`` connections, all open at once, hang up after the answers, and
    return the most bytes that one of them got as an answer."""
    socks, most = [], 0
    for _ in range(times):
        with contextlib.suppress(OSError):  # it accepts no more
            sock = socket.create_connection(("127.0.0.1", port), 2.0)
            sock.settimeout(_PATIENCE_SECONDS / times)
            socks.append(sock)
            sock.sendall(said)
    for sock in socks:
        num_bytes = 0
        with sock, contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                num_bytes += len(data)
        most = max(most, num_bytes)
    return most


def memory_of(pid: int) -> int:
    """Bytes that are resident."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds_of(pid: int) -> float:
    """Computed by all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
