"""How long an operation may still take, and how soon a connection that was cut is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

_POLL_SECONDS = 0.05


def never() -> bool:
    """The ``cancelled`` of an operation that nobody cancels."""
    return False


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at`` is a reading of ``clock``, in seconds. ``cancelled`` may end it earlier."""

    at: float
    clock: Callable[[], float]
    cancelled: Callable[[], bool] = never

    def remaining(self) -> float:
        """Seconds left; 0.0 if it has passed or was cancelled."""
        return 0.0 if self.cancelled() else max(0.0, self.at - self.clock())

    def wait(self, event: threading.Event) -> bool:
        """Whether ``event`` is set by then."""
        while not event.is_set() and (left := self.remaining()) > 0.0:
            event.wait(min(left, _POLL_SECONDS))
        return event.is_set()


# A host that vanished, or a NAT that forgot the connection, is noticed after 10 + 3 * 5 seconds of
# silence.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


def keep_alive(sock: socket.socket) -> None:
    """For a TCP socket, which also sends without delay. Raises ``OSError`` for one that is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
