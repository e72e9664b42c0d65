"""A TCP proxy on loopback that fails as networks and dying servers do, or alters what passes.

One fault is armed at a time. It strikes the first connection that carries more than ``offset``
bytes in the fault's direction from then on, and only that one unless it is ``sticky``.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum


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


class FaultProxy:
    """Listens on ``port`` of loopback and forwards to ``target_port``. ``alter``: what becomes of
    all that is read, in whatever pieces, of a direction."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self.alter: dict[Direction, Callable[[bytes], bytes]] = {}
        self._armed: Fault | None = None
        self._struck = 0
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def num_struck(self) -> int:
        """How many faults have struck a connection."""
        return self._struck

    def arm(self, fault: Fault | None) -> None:
        """Arm ``fault`` in place of any that still waits."""
        with self._lock:
            self._armed = fault

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            victims = list(self._open)
        for sock in victims:
            _cut(sock)
        for thread in self._threads:
            thread.join(5)

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
            self._spawn(self._forward, client, server, Direction.REQUEST)
            self._spawn(self._forward, server, client, Direction.REPLY)

    def _forward(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
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
            for sock in (source, target):
                _cut(sock)
                with self._lock:
                    self._open.discard(sock)
                sock.close()

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


@contextlib.contextmanager
def fault_proxy(target_port: int) -> Iterator[FaultProxy]:
    """A proxy to ``target_port``, closed afterwards."""
    proxy = FaultProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
