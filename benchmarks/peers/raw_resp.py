"""A RESP client that only moves bytes: the limit for the Redis tier.

No checksums, no deadlines, one thread per connection; each value is received by one call into its
final place and sent from its own memory, pipelined.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lmcache_connector.storage.redis.client.resp import bulk_line, command, set_command


@dataclass(frozen=True)
class RawValue:
    key: bytes
    view: memoryview


@dataclass(frozen=True)
class RawSettings:
    """``window``: values under way per connection."""

    connections: int
    window: int


def connect(address: tuple[str, int] | str) -> socket.socket:
    """TCP for ``(host, port)``, a Unix socket for a path."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        return sock
    sock = socket.create_connection(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def get_all(
    address: tuple[str, int] | str, values: Sequence[RawValue], settings: RawSettings
) -> None:
    """GET every value into its view. Values must exist with exactly that size."""
    _share_out(address, values, settings, _get)


def set_all(
    address: tuple[str, int] | str, values: Sequence[RawValue], settings: RawSettings
) -> None:
    """SET every value from its view."""
    _share_out(address, values, settings, _set)


def _share_out(
    address: tuple[str, int] | str,
    values: Sequence[RawValue],
    settings: RawSettings,
    work: Callable[[socket.socket, Sequence[RawValue], int], None],
) -> None:
    number = settings.connections
    sockets = [connect(address) for _ in range(number)]
    with ThreadPoolExecutor(number) as pool:
        shares = [
            pool.submit(work, sock, values[i::number], settings.window)
            for i, sock in enumerate(sockets)
        ]
    for share in shares:
        share.result()


def _get(sock: socket.socket, values: Sequence[RawValue], window: int) -> None:
    requests = [command(b"GET", value.key) for value in values]
    tail = bytearray(2)
    with sock:
        sock.sendall(b"".join(requests[:window]))
        for i, value in enumerate(values):
            line = bytearray(len(bulk_line(len(value.view))))
            sock.recv_into(line, len(line), socket.MSG_WAITALL)
            _receive(sock, [value.view, memoryview(tail)])
            if line != bulk_line(len(value.view)):
                raise RuntimeError(f"unexpected reply {bytes(line)!r}")
            if i + window < len(values):
                sock.sendall(requests[i + window])


def _receive(sock: socket.socket, views: list[memoryview]) -> None:
    wanted = sum(map(len, views))
    if sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0] != wanted:
        raise RuntimeError("the server closed the connection")


def _set(sock: socket.socket, values: Sequence[RawValue], window: int) -> None:
    with sock:
        for i, value in enumerate(values):
            head, tail = set_command(value.key, len(value.view), ())
            _send(sock, [memoryview(head), value.view, memoryview(tail)])
            if i >= window:
                _expect_ok(sock, 1)
        _expect_ok(sock, min(window, len(values)))


def _expect_ok(sock: socket.socket, count: int) -> None:
    answers = bytearray(5 * count)
    sock.recv_into(answers, len(answers), socket.MSG_WAITALL)
    if answers != b"+OK\r\n" * count:
        raise RuntimeError(f"unexpected reply {bytes(answers)!r}")


def _send(sock: socket.socket, views: list[memoryview]) -> None:
    """A blocking sendmsg of a stream socket sends all of it."""
    if sock.sendmsg(views) != sum(map(len, views)):
        raise RuntimeError("short send")
