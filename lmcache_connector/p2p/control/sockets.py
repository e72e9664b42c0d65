"""TCP sockets of both planes: keepalive everywhere, and errors in words."""

from __future__ import annotations

import socket

from lmcache_connector.net.keepalive import keep_alive
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.reasons import Reason


def listening_socket(host: str, port: int) -> socket.socket:
    """Raises ``PeerError`` if the port is taken, or ``host`` is not an address of this machine."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # IPv4 where a name has both.
        family, _, _, _, place = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return socket.create_server(place[:2], family=family)
    except OSError as error:
        raise PeerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def is_of_this_machine(host: str) -> bool:
    """Whether something can listen there."""
    try:
        listening_socket(host, 0).close()
    except PeerError:
        return False
    return True


def connected_socket(host: str, port: int, seconds: float) -> socket.socket:
    """Raises ``PeerError`` within ``seconds`` per address of the name."""
    try:
        sock = socket.create_connection((host, port), timeout=seconds)
        keep_alive(sock)
    except OSError as error:
        why = error.strerror or error
        raise PeerError(f"{host}:{port} cannot be reached: {why}", Reason.UNREACHABLE) from error
    return sock
