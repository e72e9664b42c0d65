"""Somebody between two peers: passes their bytes on, or alters them as a test wants."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

from lmcache_connector.net.address import Address

Alter = Callable[[bytes], bytes]


def as_it_is(data: bytes) -> bytes:
    return data


class Relay:
    """Listens on a port of its own, and dials ``target`` for whoever comes. ``alter``: what becomes
    of each read of the client's bytes, ``alter_back`` of the target's. Bounded: at most
    ``max_clients`` at a time."""

    def __init__(
        self,
        target: Address,
        alter: Alter = as_it_is,
        max_clients: int = 64,
        alter_back: Alter = as_it_is,
    ) -> None:
        self._target = target
        self.alter = alter
        self.alter_back = alter_back
        self._slots = threading.Semaphore(max_clients)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.num_bytes = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._thread.join(5)

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            victims = list(self._open)
        for sock in victims:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._target.host, self._target.port))
            except OSError:
                return
            with self._lock:
                self._open |= {client, server}
            self._slots.acquire()
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()
            threading.Thread(target=self._pass_back, args=(server, client), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                self.num_bytes += len(data)
                server.sendall(self.alter(data))
        except OSError:
            pass
        finally:
            self._end(client, server)
            self._slots.release()

    def _pass_back(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                client.sendall(self.alter_back(data))
        except OSError:
            pass
        finally:
            self._end(client, server)

    def _end(self, *socks: socket.socket) -> None:
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        with self._lock:
            self._open -= set(socks)
