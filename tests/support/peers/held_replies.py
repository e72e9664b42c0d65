"""A TCP proxy in front of a peer, whose replies come when a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.support.redis.loopback_proxy import LoopbackProxy, cut


class HeldReplies(LoopbackProxy):
    """For one client at a time. While ``is_holding``, replies pass only by `let`."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self._changed = threading.Condition()
        self._held = bytearray()
        self.is_holding = False
        self._spawn(self._accept)

    def let(self, num_bytes: int) -> None:
        """Pass on so many bytes, once the peer has sent them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._held) >= num_bytes, 20.0)
            self._client.sendall(self._held[:num_bytes])
            del self._held[:num_bytes]

    def cut(self) -> None:
        """Break the connection."""
        cut(self._client)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        self._client, self._held = client, bytearray()
        self._spawn(self._pass_requests, client, server)
        self._spawn(self._pass_replies, server, client, self._held)

    def _pass_requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        self._end(client, server)

    def _pass_replies(self, server: socket.socket, client: socket.socket, held: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                with self._changed:
                    held += data
                    if not self.is_holding:
                        client.sendall(held)
                        held.clear()
                    self._changed.notify_all()
        self._end(client, server)
