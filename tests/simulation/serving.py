"""Sockets that listen, and `selectors` over them: for the product's own servers, those of peers."""

from __future__ import annotations

import errno
import selectors as real_selectors
import socket as real_socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from tests.simulation.kernel import Waiter
from tests.simulation.network import Address, Link, Network, SimSocket, socket
from tests.simulation.stdlib import RUNTIME, Stand

_WINDOW_BYTES = 256 * 1024
_READ, _WRITE = real_selectors.EVENT_READ, real_selectors.EVENT_WRITE


class _Pollable:
    """What a selector waits for."""

    family = real_socket.AF_INET

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self.is_closed = False
        self._received = bytearray()

    @property
    def is_readable(self) -> bool:
        return bool(self._received)

    @property
    def is_writable(self) -> bool:
        return True

    def changed(self) -> None:
        for waiter in self.waiters:
            RUNTIME.kernel.wake(waiter)
        self.waiters.clear()

    def deliver(self, data: bytes) -> None:
        self._received += data
        self.changed()

    def recv(self, size: int) -> bytes:
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def setblocking(self, flag: bool) -> None:
        """A server never blocks."""

    def setsockopt(self, *_: object) -> None:
        """Keep-alives are not simulated."""


class Listener(_Pollable):
    """A service of the network. Killed, its process resets all connections."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self._network: Network = RUNTIME.network
        if address in self._network.services:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self.address = address
        self._pending: deque[Accepted] = deque()
        self._network.listen(address, self)
        RUNTIME.process.on_kill.append(self._vanish)

    @property
    def is_readable(self) -> bool:
        return bool(self._pending)

    def accept(self, link: Link | None = None) -> Any:
        """The network's call, with a ``link``; or that of ``socket.socket``."""
        if link is None:
            if not self._pending:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            accepted = self._pending.popleft()
            return accepted, (accepted.link.process.name, 0)
        link.state = Accepted(link)
        self._pending.append(link.state)
        self.changed()
        return None

    def receive(self, link: Link, data: bytes) -> None:
        link.state.deliver(data)

    def closed(self, link: Link) -> None:
        link.state.end()

    def close(self) -> None:
        """Nobody new can connect."""
        self.is_closed = True
        for accepted in self._pending:
            accepted.close()
        if self._network.services.get(self.address) is self:
            del self._network.services[self.address]

    def _vanish(self) -> None:
        self._network.services.pop(self.address, None)
        for link in self._network.open_links(self.address):
            link.reset()


class Accepted(_Pollable):
    """The server's end of a link."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self._is_at_end = False
        self._num_sent = 0  # bytes that have not arrived
        link.on_arrival = self._arrived

    def end(self) -> None:
        self._is_at_end = True
        self.changed()

    def _arrived(self, num_bytes: int) -> None:
        self._num_sent -= num_bytes
        self.changed()

    @property
    def is_readable(self) -> bool:
        return super().is_readable or self._is_at_end

    @property
    def is_writable(self) -> bool:
        return self._is_at_end or self._num_sent < _WINDOW_BYTES

    def recv(self, size: int) -> bytes:
        if not self._received and not self._is_at_end:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return super().recv(size)

    def sendmsg(self, views: Sequence[Any]) -> int:
        if self._is_at_end or self.link.is_closed:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        room = _WINDOW_BYTES - self._num_sent
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        data = b"".join(bytes(view) for view in views)[:room]
        self._num_sent += len(data)
        self.link.to_client(data)
        return len(data)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.link.hang_up()


class _PairEnd(_Pollable):
    """Of ``socket.socketpair``, which wakes a server."""

    other: _PairEnd

    def send(self, data: bytes) -> int:
        if self.is_closed or self.other.is_closed:
            raise OSError(errno.EBADF, "closed")
        self.other.deliver(data)
        return len(data)

    def close(self) -> None:
        self.is_closed = True


def _socketpair() -> tuple[_PairEnd, _PairEnd]:
    one, two = _PairEnd(), _PairEnd()
    one.other, two.other = two, one
    return one, two


class _Selector:
    """``selectors.DefaultSelector``."""

    def __init__(self) -> None:
        self._keys: dict[Any, real_selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> None:
        if fileobj in self._keys:
            raise KeyError("registered already")
        self._keys[fileobj] = real_selectors.SelectorKey(fileobj, 0, events, data)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> None:
        self.unregister(fileobj)
        self.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> None:
        del self._keys[fileobj]

    def get_map(self) -> dict[Any, real_selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float) -> list[tuple[real_selectors.SelectorKey, int]]:
        kernel = RUNTIME.kernel
        end = kernel.now + timeout
        while not (ready := self._ready()) and kernel.now < end:
            for pollable in self._keys:
                pollable.waiters.append(kernel.waiter())
            kernel.park(end - kernel.now)
            for pollable in self._keys:
                pollable.waiters.clear()  # this selector is the only one that waits for it
        kernel.maybe_stall()
        return ready

    def _ready(self) -> list[tuple[real_selectors.SelectorKey, int]]:
        found = []
        for key in self._keys.values():
            mask = _READ if key.events & _READ and key.fileobj.is_readable else 0  # type: ignore[union-attr]
            mask |= _WRITE if key.events & _WRITE and key.fileobj.is_writable else 0  # type: ignore[union-attr]
            if mask:
                found.append((key, mask))
        return found

    def close(self) -> None:
        self._keys.clear()


def _create_server(address: Address, **_: object) -> Listener:
    return Listener((address[0], int(address[1])))


selectors = Stand(real_selectors, {"DefaultSelector": _Selector})
vars(socket).update(create_server=_create_server, socketpair=_socketpair)
assert SimSocket is socket.socket
