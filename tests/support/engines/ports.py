"""Ports that engines of a test may listen on."""

from __future__ import annotations

import socket

from tests.support.redis.servers import free_port


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on, as far as one can know."""
    while True:
        port = free_port()
        try:
            for offset in range(1, count):
                with socket.create_server(("127.0.0.1", port + offset)):
                    pass
        except OSError:
            continue
        return port
