"""TCP proxies on loopback: one fails as networks and dying servers do, one holds replies back."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
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
                is_late = self._closed.is_set()  # `close` has not seen these
            if is_late:
                self._end(client, server)
                return
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
    """``alter``: a function by direction, applied to whatever pieces of bytes are read."""

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


class HeldReplies(LoopbackProxy):
    """For one client at a time. While ``is_holding``, replies pass only by `let` or `let_any`."""

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

    def let_any(self) -> None:
        """Pass on a byte, if there is one and somebody to read it."""
        with self._changed, contextlib.suppress(OSError):
            self._client.sendall(self._held[:1])
            del self._held[:1]

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
