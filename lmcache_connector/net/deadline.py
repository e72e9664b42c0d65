"""Deadlines of operations, and keepalive of TCP connections."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

_POLL_SECONDS = 0.05


def never() -> bool:
    """``cancelled`` of an operation that is not cancelled."""
    return False


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at``: in seconds of ``clock``. ``cancelled()`` ends the operation earlier."""

    at: float
    clock: Callable[[], float]
    cancelled: Callable[[], bool] = never

    def remaining(self) -> float:
        """Seconds left; 0.0 after the deadline or a cancellation."""
        return 0.0 if self.cancelled() else max(0.0, self.at - self.clock())

    def wait(self, wait: Callable[[float], bool]) -> bool:
        """Call ``wait(seconds)`` until it is true or the deadline has passed; its last result."""
        while (left := self.remaining()) > 0.0:
            if wait(min(left, _POLL_SECONDS)):
                return True
        return wait(0.0)


# A vanished host, or a NAT that dropped the connection, is noticed after 10 + 3 * 5 seconds.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


def keep_alive(sock: socket.socket) -> None:
    """Also disables Nagle's algorithm. For TCP sockets; raises ``OSError`` if closed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
