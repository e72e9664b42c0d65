"""Connections that were cut without a word are noticed, by both planes and towards Redis."""

from __future__ import annotations

import socket

# A host that vanished, or a NAT that forgot the connection, is noticed after 10 + 3 * 5 seconds of
# silence.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


def keep_alive(sock: socket.socket) -> None:
    """For a TCP socket, which also sends without delay. Raises ``OSError`` for one that is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
