"""What TCP proxies on loopback have in common: clients, each with a connection to the target."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self


class LoopbackProxy:
    """Listens on ``port`` and connects whoever comes with ``target_port``. Closed by a ``with``."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        cut(self._listener)
        self._listener.close()
        with self._lock:
            victims = list(self._open)
        for sock in victims:
            cut(sock)
        for thread in self._threads:
            thread.join(5)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Both ways, on threads of their own."""
        raise NotImplementedError

    def _spawn(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            with contextlib.suppress(OSError):  # it may be reset already
                for sock in (client, server):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._forward(client, server)

    def _end(self, *sockets: socket.socket) -> None:
        for sock in sockets:
            cut(sock)
            with self._lock:
                self._open.discard(sock)
            sock.close()


def cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
