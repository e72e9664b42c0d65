"""A TCP proxy on loopback that is as slow as a network: bandwidth, latency, and silence.

Connections share the bandwidth of each direction unless the proxy is narrow. While the link is
stalled, bytes stay on their way. A stall takes effect at once, other settings with the next piece.

In a process of its own (`proxy_process`), the proxy takes no interpreter time from the process that
measures.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from tests.support.redis.proxies import LoopbackProxy

_PIECE_BYTES = 1 << 16
_MAX_PIECES = 4096  # on their way per connection and direction
_POLL_SECONDS = 0.005

# When each piece arrives (``time.monotonic``), and its bytes; none at the end.
_Pieces = queue.Queue[tuple[float, bytes]]


class SlowLink:
    """How fast the link is; any process may change that. ``latency_seconds``: of a round trip."""

    def __init__(self) -> None:
        self._bytes_per_second = multiprocessing.Value("d", float("inf"))
        self._latency_seconds = multiprocessing.Value("d", 0.0)
        self._stalled = multiprocessing.Value("b", 0)

    def set(
        self,
        bytes_per_second: float = float("inf"),
        latency_seconds: float = 0.0,
        stalled: bool = False,
    ) -> None:
        self._bytes_per_second.value = bytes_per_second
        self._latency_seconds.value = latency_seconds
        self._stalled.value = stalled

    @property
    def bytes_per_second(self) -> float:
        return float(self._bytes_per_second.value)

    @property
    def latency_seconds(self) -> float:
        return float(self._latency_seconds.value)

    @property
    def stalled(self) -> bool:
        return bool(self._stalled.value)


class SlowProxy(LoopbackProxy):
    """``is_narrow``: little is on its way at once, so that whoever sends notices how slow the link
    is, and no connection waits for what others, closed ones too, have on their way."""

    def __init__(self, target_port: int, link: SlowLink, *, is_narrow: bool = False) -> None:
        super().__init__(target_port)
        self._link = link
        self._is_narrow = is_narrow
        self._ways = _Direction(link), _Direction(link)
        if is_narrow:  # those that it accepts have the same
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PIECE_BYTES)
        threading.Thread(target=self._accept, daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        if self._is_narrow:
            self._ways = _Direction(self._link), _Direction(self._link)
        there, back = self._ways
        for source, target, way in ((client, server, there), (server, client, back)):
            pieces: _Pieces = queue.Queue(1 if self._is_narrow else _MAX_PIECES)
            for work, more in (
                (self._receive, (source, pieces)),
                (self._send, (source, target, pieces, way)),
            ):
                threading.Thread(target=work, args=more, daemon=True).start()

    def _receive(self, source: socket.socket, pieces: _Pieces) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(_PIECE_BYTES)
            except OSError:
                data = b""
            pieces.put((time.monotonic() + self._link.latency_seconds / 2, data))

    def _send(
        self,
        source: socket.socket,
        target: socket.socket,
        pieces: _Pieces,
        direction: _Direction,
    ) -> None:
        while not self._closed.is_set():
            arrives_at, data = pieces.get()
            if not data:
                break
            direction.pass_through(len(data), arrives_at, self._closed)
            try:
                target.sendall(data)
            except OSError:
                break
        self._end(source, target)


class _Direction:
    """One direction of the link, shared by all connections."""

    def __init__(self, link: SlowLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pass_through(self, num_bytes: int, arrives_at: float, closed: threading.Event) -> None:
        """Return when the bytes have arrived at the other end, or ``closed`` is set.

        ``arrives_at`` (``time.monotonic``): the earliest, for the latency.
        """
        now = time.monotonic()
        with self._lock:
            self._free_at = max(self._free_at, now) + num_bytes / self._link.bytes_per_second
            out_at = max(self._free_at, arrives_at)
        if out_at > now:
            closed.wait(out_at - now)
        while self._link.stalled and not closed.is_set():
            closed.wait(_POLL_SECONDS)


@contextlib.contextmanager
def proxy_process(target_port: int, link: SlowLink) -> Iterator[int]:
    """The proxy in a process of its own; yields its port."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(target_port, link, theirs), daemon=True)
    process.start()
    try:
        yield mine.recv()
    finally:
        process.kill()
        process.join()


def _serve(target_port: int, link: SlowLink, pipe: Connection) -> None:
    pipe.send(SlowProxy(target_port, link).port)
    threading.Event().wait()
