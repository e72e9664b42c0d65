"""A TCP proxy on loopback that fails as networks and dying servers do, or alters what passes.

One fault is armed at a time. It strikes the first connection that carries more than ``offset``
bytes in the fault's direction from then on, and only that one unless it is ``sticky``.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tests.support.redis.loopback_proxy import LoopbackProxy


class Kind(Enum):
    """What a fault does to the bytes that it strikes."""

    DELAY = "delay"  # hold the bytes back for ``seconds``
    DROP = "drop"  # swallow ``length`` bytes
    CLOSE = "close"  # cut the connection
    RESET = "reset"  # cut it with a TCP reset
    FLIP = "flip"  # change one bit
    STALL = "stall"  # fall silent for good, without closing the connection
    INSERT = "insert"  # insert a reply that nobody asked for


class Direction(Enum):
    REPLY = "reply"
    REQUEST = "request"


@dataclass(frozen=True)
class Fault:
    """``seconds`` is for `Kind.DELAY`, ``length`` in bytes for `Kind.DROP`."""

    kind: Kind
    offset: int = 0
    direction: Direction = Direction.REPLY
    seconds: float = 0.05
    length: int = 1
    # Strike every connection from now on, not just one.
    sticky: bool = False


class FaultProxy(LoopbackProxy):
    """``alter``: what becomes of all that is read, in whatever pieces, of a direction."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self.alter: dict[Direction, Callable[[bytes], bytes]] = {}
        self._armed: Fault | None = None
        self._struck = 0
        self._spawn(self._accept)

    @property
    def num_struck(self) -> int:
        """How many faults have struck a connection."""
        return self._struck

    def arm(self, fault: Fault | None) -> None:
        """Arm ``fault`` in place of any that still waits."""
        with self._lock:
            self._armed = fault

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        self._spawn(self._pass_on, client, server, Direction.REQUEST)
        self._spawn(self._pass_on, server, client, Direction.REPLY)

    def _pass_on(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        fault: Fault | None = None
        passed = 0
        try:
            while data := source.recv(1 << 16):
                if alter := self.alter.get(direction):
                    data = alter(data)
                if (armed := self._armed) is not fault:
                    fault, passed = armed, 0
                if fault is not None and fault.direction is direction:
                    at = fault.offset - passed
                    if at < len(data) and self._take(fault):
                        target.sendall(data[:at])
                        data = self._strike(fault, data[at:], target)
                        fault = None
                passed += len(data)
                target.sendall(data)
        except (OSError, ValueError):
            pass  # one side is gone (a closed socket has no descriptor), the other follows
        finally:
            self._end(source, target)

    def _take(self, fault: Fault) -> bool:
        """Whether the caller is to strike: another connection may have been faster."""
        with self._lock:
            if self._armed is not fault:
                return False
            if not fault.sticky:
                self._armed = None
            return True

    def _strike(self, fault: Fault, data: bytes, target: socket.socket) -> bytes:
        """The bytes to forward in place of ``data``. Raises ``OSError`` to cut the connection."""
        self._struck += 1
        match fault.kind:
            case Kind.DELAY:
                self._closed.wait(fault.seconds)
            case Kind.DROP:
                return data[fault.length :]
            case Kind.CLOSE:
                raise ConnectionAbortedError
            case Kind.RESET:
                linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
                target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                target.shutdown(socket.SHUT_RD)  # wakes the other direction's thread
                target.close()
                raise ConnectionResetError
            case Kind.FLIP:
                return bytes([data[0] ^ 0x10]) + data[1:]
            case Kind.STALL:
                self._wait_for_hang_up(target)
                raise ConnectionAbortedError
            case Kind.INSERT:
                return b"+OK\r\n" + data
        return data

    def _wait_for_hang_up(self, sock: socket.socket) -> None:
        """Wait until the peer closes the connection, or the proxy ends."""
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        while not self._closed.is_set() and sock.fileno() >= 0 and not poll.poll(20):
            continue
