"""Streams of bytes between simulated machines, and the `socket` and `select` modules over them.

As TCP does, a stream keeps its bytes in order and cuts them where it likes; how late they are is
the :class:`Path`'s business. A *service* listens at an address and is called with what arrives.
"""

from __future__ import annotations

import errno
import fcntl as real_fcntl
import select as real_select
import socket as real_socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tests.simulation.kernel import Kernel, Process, Waiter
from tests.simulation.stdlib import RUNTIME, Stand

Address = tuple[str, int]

_WINDOW_BYTES = 256 * 1024
_RETRANSMIT_SECONDS = 0.2
_TIMEVAL = struct.Struct("@ll")


class Service(Protocol):
    """What listens at an address."""

    def accept(self, link: Link) -> None:
        """A client has connected."""
        ...

    def receive(self, link: Link, data: bytes) -> None:
        """Bytes have come."""
        ...

    def closed(self, link: Link) -> None:
        """The link is gone."""
        ...


@dataclass
class Path:
    """The way to one address, in both directions. Faults change it.

    ``segment_bytes`` arrive at once, at most. ``reset_chance``: that a message breaks its link.
    ``is_cut``: nothing arrives, and nobody is told. ``refuses``: nobody listens.
    """

    latency_seconds: float = 0.0003
    jitter_seconds: float = 0.0001
    bytes_per_second: float = 5e8
    segment_bytes: int = 1 << 16
    reset_chance: float = 0.0
    is_cut: bool = False
    refuses: bool = False


@dataclass(eq=False)
class Network:
    """Who listens where, over which path, and all links."""

    kernel: Kernel
    services: dict[Address, Service] = field(default_factory=dict)
    paths: dict[Address, Path] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    sockets: dict[int, SimSocket] = field(default_factory=dict)

    def listen(self, address: Address, service: Service) -> Path:
        self.services[address] = service
        return self.paths.setdefault(address, Path())

    def open_links(self, address: Address | None = None) -> list[Link]:
        self.links = [link for link in self.links if not link.is_closed]
        return [link for link in self.links if address in (None, link.address)]


class Link:
    """One connection of ``client``, a socket of ``process``. ``state`` is the service's own."""

    def __init__(self, network: Network, client: SimSocket, address: Address) -> None:
        self.network = network
        self.address = address
        self.process: Process = client.process
        self.is_closed = False
        self.state: Any = None
        self.num_unread = 0  # bytes on their way to the service
        self._client = client
        self._out = _Stream(self, self._deliver_to_service)
        self._in = _Stream(self, self._deliver_to_client)
        self.on_arrival: Callable[[int], None] = lambda num_bytes: None
        """Called with the number of bytes when some of what the service has sent arrives."""

    @property
    def path(self) -> Path:
        return self.network.paths[self.address]

    @property
    def service(self) -> Service | None:
        return self.network.services.get(self.address)

    def to_service(self, data: bytes) -> None:
        self.num_unread += len(data)
        self._out.send(data)

    def to_client(self, data: bytes) -> None:
        self._in.send(data)

    def reset(self) -> None:
        """Break it. Both ends learn; bytes on their way are lost."""
        if not self.is_closed:
            self._client.break_off()
            self.close()

    def hang_up(self) -> None:
        """The service closes in order: what it has sent arrives before the end does."""
        self._in.send_end(self._client.deliver_end)

    def close(self) -> None:
        """The client is gone."""
        if not self.is_closed:
            self.is_closed = True
            if self.service is not None:
                self.service.closed(self)

    def _deliver_to_client(self, data: bytes) -> None:
        self._client.deliver(data)
        self.on_arrival(len(data))

    def _deliver_to_service(self, data: bytes) -> None:
        self.num_unread -= len(data)
        self._client.wake_senders()
        if self.service is None:
            self.reset()
        else:
            self.service.receive(self, data)


class _Stream:
    """One direction of a link."""

    def __init__(self, link: Link, deliver: Callable[[bytes], None]) -> None:
        self._link = link
        self._deliver = deliver
        self._arrives_at = 0.0
        self._held: deque[Callable[[], None]] = deque()

    def send(self, data: bytes) -> None:
        kernel, path = self._link.network.kernel, self._link.path
        if path.reset_chance and kernel.chance.random() < path.reset_chance:
            kernel.after(path.latency_seconds * kernel.chance.random(), self._link.reset)
        for part in _cut(data, path.segment_bytes, kernel):
            self._arrive_later(partial(self._deliver, part), len(part))

    def send_end(self, deliver: Callable[[], None]) -> None:
        self._arrive_later(deliver, 0)

    def _arrive_later(self, deliver: Callable[[], None], num_bytes: int) -> None:
        kernel, path = self._link.network.kernel, self._link.path
        when = kernel.now + path.latency_seconds + path.jitter_seconds * kernel.chance.random()
        self._arrives_at = max(when, self._arrives_at) + num_bytes / path.bytes_per_second
        kernel.at(self._arrives_at, partial(self._arrive, deliver))

    def _arrive(self, deliver: Callable[[], None]) -> None:
        if self._link.is_closed:
            return
        if self._held:
            self._held.append(deliver)
        elif self._link.path.is_cut:
            self._held.append(deliver)
            self._link.network.kernel.after(_RETRANSMIT_SECONDS, self._send_again)
        else:
            deliver()

    def _send_again(self) -> None:
        if self._link.path.is_cut and not self._link.is_closed:
            self._link.network.kernel.after(_RETRANSMIT_SECONDS, self._send_again)
            return
        while self._held:
            deliver = self._held.popleft()
            if not self._link.is_closed:
                deliver()


def _cut(data: bytes, most: int, kernel: Kernel) -> list[bytes]:
    """Pieces of random sizes up to ``most``."""
    parts, at = list[bytes](), 0
    while at < len(data):
        size = most if kernel.chance.random() < 0.8 else kernel.chance.randint(1, most)
        parts.append(data[at : at + size])
        at += size
    return parts


class SimSocket:
    """A connected, or to be connected, stream socket with the calls that the product makes."""

    def __init__(self, family: int = 2, type: int = 1, proto: int = 0, fileno: Any = None) -> None:  # noqa: A002
        self.family, self.type, self.proto = family, type, proto
        self.process = RUNTIME.process
        self._network: Network = RUNTIME.network
        self._fd = 1000 + self._network.kernel.new_id()
        self._network.sockets[self._fd] = self
        self._link: Link | None = None
        self._timeout: float | None = None
        self._option_timeouts: dict[int, float | None] = {}
        self._received = bytearray()
        self._is_at_end = False
        self._is_broken = False
        self._is_closed = False
        self._readers: list[Waiter] = []
        self._senders: list[Waiter] = []
        self.process.on_kill.append(self._vanish)

    # -- called by the link --------------------------------------------------------------------

    def deliver(self, data: bytes) -> None:
        self._received += data
        self._wake(self._readers)

    def deliver_end(self) -> None:
        self._is_at_end = True
        self._wake(self._readers)

    def break_off(self) -> None:
        self._is_broken = True
        self._received.clear()
        self._wake(self._readers)
        self._wake(self._senders)

    def wake_senders(self) -> None:
        self._wake(self._senders)

    # -- the calls of `socket.socket` ------------------------------------------------------------

    def connect(self, address: Address) -> None:
        network, kernel = self._network, self._network.kernel
        host, port = address[0], int(address[1])
        path = network.paths.get((host, port))
        end = None if self._timeout is None else kernel.now + self._timeout
        if path is None:
            kernel.sleep(0.0005)
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        kernel.sleep(min(2 * path.latency_seconds, 120.0 if end is None else self._timeout or 0.0))
        while path.is_cut or (end is not None and kernel.now >= end):
            if end is None or kernel.now >= end:
                raise TimeoutError("timed out")
            kernel.sleep(min(_RETRANSMIT_SECONDS, end - kernel.now))
        service = network.services.get((host, port))
        if path.refuses or service is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self._link = Link(network, self, (host, port))
        network.links.append(self._link)
        service.accept(self._link)

    def recv(self, size: int, flags: int = 0) -> bytes:
        view = memoryview(bytearray(size))
        return bytes(view[: self.recv_into(view, flags=flags)])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        return self.recvmsg_into([view[:nbytes] if nbytes else view], 0, flags)[0]

    def recvmsg_into(
        self, views: Sequence[memoryview], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, Any]:
        if flags & ~(real_socket.MSG_WAITALL | real_socket.MSG_DONTWAIT | real_socket.MSG_PEEK):
            raise NotImplementedError(f"recv flags {flags}")
        wanted = sum(len(view) for view in views)
        wait_all = bool(flags & real_socket.MSG_WAITALL)
        timeout = 0.0 if flags & real_socket.MSG_DONTWAIT else self._limit(real_socket.SO_RCVTIMEO)
        kernel, count = self._network.kernel, 0
        end = None if timeout is None else kernel.now + timeout
        while count < wanted:
            left = None if end is None else max(0.0, end - kernel.now)
            kernel.wait_for(lambda: self.is_readable, self._readers, left)
            kernel.maybe_stall()  # what has come is copied when the thread runs again
            if not self._received:
                break
            part = self._copy(views, count, keep=bool(flags & real_socket.MSG_PEEK))
            count += part
            if not wait_all or flags & real_socket.MSG_PEEK:
                break
        if count or not wanted:
            return count, [], 0, None
        if self._is_broken:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if not self._is_at_end:
            raise self._nothing_came()
        return 0, [], 0, None

    def _copy(self, views: Sequence[memoryview], skip: int, *, keep: bool) -> int:
        """Copy what was received into ``views`` after ``skip`` bytes; returns how much."""
        count = 0
        for view in views:
            rest = view[skip:]
            skip = max(0, skip - len(view))
            part = self._received[count : count + len(rest)]
            rest[: len(part)] = part
            count += len(part)
        if not keep:
            del self._received[:count]
        return count

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg([data])

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[self.send(view) :]

    def sendmsg(self, views: Sequence[Any]) -> int:
        data = b"".join(bytes(view) for view in views)
        limit = self._limit(real_socket.SO_SNDTIMEO)
        self._network.kernel.wait_for(lambda: self.is_writable, self._senders, limit)
        if self._is_broken or self._link is None or self._link.is_closed:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        room = _WINDOW_BYTES - self._link.num_unread
        if room <= 0:
            raise self._nothing_came()
        self._link.to_service(data[:room])
        return min(room, len(data))

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        return self._timeout

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if level == real_socket.SOL_SOCKET and option in (
            real_socket.SO_RCVTIMEO,
            real_socket.SO_SNDTIMEO,
        ):
            seconds, micros = _TIMEVAL.unpack(value)
            self._option_timeouts[option] = (seconds + micros / 1e6) or None

    def fileno(self) -> int:
        return -1 if self._is_closed else self._fd

    def shutdown(self, how: int) -> None:
        if self._link is None or self._link.is_closed:
            raise OSError(errno.ENOTCONN, "not connected")
        self._link.close()

    def close(self) -> None:
        self._is_closed = True
        self._network.sockets.pop(self._fd, None)
        if self._vanish in self.process.on_kill:
            self.process.on_kill.remove(self._vanish)
        if self._link is not None:
            self._link.close()

    @property
    def is_readable(self) -> bool:
        return bool(self._received) or self._is_at_end or self._is_broken

    @property
    def is_writable(self) -> bool:
        link = self._link
        return self._is_broken or link is None or link.is_closed or link.num_unread < _WINDOW_BYTES

    # -- details -------------------------------------------------------------------------------

    def _vanish(self) -> None:
        if self._link is not None:
            self._link.is_closed = True

    def _limit(self, option: int) -> float | None:
        return self._timeout if self._timeout is not None else self._option_timeouts.get(option)

    def _nothing_came(self) -> OSError:
        if self._timeout:
            return TimeoutError("timed out")
        return BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def _wake(self, waiters: list[Waiter]) -> None:
        for waiter in waiters:
            self._network.kernel.wake(waiter)
        waiters.clear()


class _Poll:
    """``select.poll``."""

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}

    def register(self, sock: Any, events: int = real_select.POLLIN) -> None:
        self._registered[sock if isinstance(sock, int) else sock.fileno()] = events

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """``timeout`` is in milliseconds."""
        kernel = RUNTIME.kernel
        end = None if timeout is None or timeout < 0 else kernel.now + timeout / 1000
        while not (ready := self._ready()) and (end is None or kernel.now < end):
            kernel.sleep(0.001 if end is None else min(0.001, end - kernel.now))
        return ready

    def _ready(self) -> list[tuple[int, int]]:
        found = []
        for fd, events in self._registered.items():
            sock = RUNTIME.network.sockets.get(fd)
            mask = real_select.POLLNVAL if sock is None else 0
            if sock is not None:
                mask |= events & real_select.POLLIN if sock.is_readable else 0
                mask |= events & real_select.POLLOUT if sock.is_writable else 0
            if mask:
                found.append((fd, mask))
        return found


def _resolve(
    host: str,
    port: int,
    family: int = 0,
    type: int = 0,  # noqa: A002
    proto: int = 0,
    flags: int = 0,
) -> list[tuple[Any, ...]]:
    RUNTIME.kernel.sleep(0.0002)
    if not any(name == host for name, _ in RUNTIME.network.paths):
        raise real_socket.gaierror(real_socket.EAI_NONAME, "Name or service not known")
    return [(real_socket.AF_INET, real_socket.SOCK_STREAM, 6, "", (host, int(port)))]


socket = Stand(
    real_socket,
    {
        "socket": SimSocket,
        "getaddrinfo": _resolve,
    },
)
fcntl = Stand(real_fcntl, {"ioctl": lambda sock, request, argument: bytes(len(argument))})
select = Stand(real_select, {"poll": _Poll})
