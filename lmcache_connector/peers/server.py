"""Serves the chunks of one rank's CPU tier to whoever connects: all clients on one thread.

What a client may cost is bounded: what it may say ahead, what it may leave unread, and for how
long. While so much is leased that others might go short, nobody's next command is answered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lmcache_connector.net.deadline import keep_alive
from lmcache_connector.peers.commands import (
    MAX_COMMAND_BYTES,
    OK,
    Client,
    CommandParser,
    Commands,
    Lease,
    ProtocolError,
    Reply,
)
from lmcache_connector.peers.host import HostDoor
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

# How often clients are looked at that owe something, and how often leases of KV transfers are.
_POLL_SECONDS, _IDLE_SECONDS = 0.1, 1.0
_READ_BYTES = 1 << 16
_MAX_VECTORS = 256
# Of answers that one client has not taken: small ones weigh more than their bytes.
_MAX_PARTS = 4096
# To one client before others have their turn: small questions cost more than their bytes too.
_MAX_ANSWERS = 64
# A client that takes less than that in ``stall_seconds`` is as good as silent. While others wait
# for what it leases, it has to take as much as may wait for it.
_LEAST_BYTES = 64 << 10
_CREDENTIALS = struct.Struct("@iII")  # process, user, group


@dataclass(frozen=True, slots=True)
class Limits:
    """``unsent_bytes`` of answers wait for one client, ``leased_bytes`` of chunks for all together;
    for ``stall_seconds`` one may leave us with half a command, or take next to nothing."""

    num_clients: int = 256
    unsent_bytes: int = 16 << 20
    leased_bytes: int = 256 << 20
    stall_seconds: float = 5.0


@dataclass(slots=True, eq=False)
class _Connection:
    """``unsent``: parts of answers; with the last of one comes its lease, if it has one.
    ``leases``: what it copies out of our memory. ``moved_at``: when a command last came whole, or
    answers were taken. ``held``: a command that
    waits for its answer, until ``held_until``."""

    sock: socket.socket
    moved_at: float
    parser: CommandParser = field(default_factory=CommandParser)
    client: Client = field(default_factory=Client)
    leases: list[Lease] = field(default_factory=list)
    unsent: deque[tuple[memoryview, Lease | None]] = field(default_factory=deque)
    unsent_bytes: int = 0
    taken_bytes: int = 0  # since ``moved_at``
    has_asked: bool = False
    held: list[bytes] | None = None
    held_until: float = 0.0
    has_more: bool = False  # maybe: whole commands that were not looked at yet
    is_ending: bool = False  # once everything is sent


class PeerServer:
    """Serves whoever connects to ``listeners``, or comes through ``door``, and closes them.
    ``clock`` returns seconds."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        commands: Commands,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        door: HostDoor | None = None,
    ) -> None:
        self._door, self._next_look = door, clock()
        self._commands = commands
        self._limits = limits or Limits()
        self._clock = clock
        self._connections: dict[socket.socket, _Connection] = {}
        self._leased_bytes = 0
        self._has_held_up = False  # in this turn somebody was not answered, as too much is leased
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._listeners = list[socket.socket]()
        for listener in (*listeners, *([door.sock] if door is not None else [])):
            self._listen_at(listener)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = start_thread("lmc-peer-server", self._serve)

    @property
    def has_door(self) -> bool:
        """Whether it is found by its name on this host, and no other engine is."""
        return self._door is not None

    @property
    def port(self) -> int:
        """Of the first listener."""
        return int(self._listeners[0].getsockname()[1])

    def look_again(self) -> None:
        """Commands that wait may have their answer by now. From any thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def close(self, seconds: float) -> bool:
        """False if the thread did not end in time: then it may still read chunks."""
        self._stopping.set()
        self.look_again()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- the server's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except Exception:  # it must not end the server
                    logger.exception("The peer server met an error")
                    self._stopping.wait(_POLL_SECONDS)  # it may be one of every turn
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            for sock in (*self._listeners, self._wake, self._woken):
                sock.close()
            self._selector.close()
            if self._door is not None:
                self._door.close()

    def _listen_at(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._listeners.append(listener)

    def _look_after_door(self, now: float) -> None:
        if self._door is None or now < self._next_look:
            return
        self._next_look = now + _IDLE_SECONDS
        if (old := self._door.renew()) is not None:
            self._listeners.remove(old)
            self._selector.unregister(old)
            old.close()
            self._listen_at(self._door.sock)

    def _turn(self) -> None:
        was_full, was_woken = self._is_full, False
        self._has_held_up = False
        for key, events in self._selector.select(self._seconds_to_look()):
            if key.fileobj in self._listeners:
                self._accept(key.fileobj)
            elif key.fileobj is self._woken:
                was_woken = bool(self._woken.recv(_READ_BYTES))
            elif (connection := self._connections.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._attend(connection, events)
        now, is_held_up = self._clock(), was_full or self._is_full
        for connection in list(self._connections.values()):
            if is_held_up and not (connection.unsent or connection.leases):
                connection.moved_at = now  # it waits for us
            waits_for_it = connection.unsent or connection.parser.num_bytes or connection.leases
            if waits_for_it and now - connection.moved_at > self._limits.stall_seconds:
                self._drop(connection)
            elif connection.held is not None and (was_woken or now >= connection.held_until):
                self._attend(connection, 0)
        if (was_full or self._has_held_up) and not self._is_full:
            for connection in list(self._connections.values()):
                self._attend(connection, 0)
        self._commands.tend()
        self._look_after_door(now)

    def _seconds_to_look(self) -> float:
        connections = self._connections.values()
        held = [c.held_until for c in connections if c.held is not None and self._may_answer(c)]
        is_owed = any(c.unsent or c.parser.num_bytes or c.leases for c in connections)
        longest = _POLL_SECONDS if is_owed or self._is_full else _IDLE_SECONDS
        return max(0.0, min(longest, min(held, default=float("inf")) - self._clock()))

    @property
    def _is_full(self) -> bool:
        return self._leased_bytes >= self._limits.leased_bytes

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            logger.debug("A peer was not accepted: %s", error)
            self._stopping.wait(_POLL_SECONDS)  # out of descriptors: it would be ready at once
            return
        try:
            sock.setblocking(False)
            is_local = sock.family == socket.AF_UNIX
            if not is_local:
                keep_alive(sock)
            elif _user_of(sock) not in (0, os.geteuid()):
                raise ValueError("it is another user's")
            self._selector.register(sock, selectors.EVENT_READ)
        except (OSError, ValueError) as error:
            logger.debug("A peer was not accepted: %s", error)
            sock.close()
            return
        # Who may enter the folder is the user, who may list what there is.
        client = Client(is_trusted=is_local, is_local=is_local)
        self._connections[sock] = _Connection(sock, self._clock(), client=client)
        if len(self._connections) > self._limits.num_clients:
            # Whoever only connects displaces nobody who has asked.
            others = list(self._connections.values())[:-1]
            self._drop(min(others, key=lambda each: (each.has_asked, each.moved_at)))

    def _attend(self, connection: _Connection, events: int) -> None:
        """Take what a client says, answer what it may be answered, send what its socket takes."""
        try:
            if events & selectors.EVENT_READ:
                data = connection.sock.recv(_READ_BYTES)
                if not data:
                    self._drop(connection)
                    return
                if not connection.parser.num_bytes:
                    connection.moved_at = self._clock()
                connection.parser.feed(data)
            self._send(connection)
            if self._answer_next(connection):
                self._send(connection)  # what else it has asked for waits until others had a turn
            if connection.is_ending and not connection.unsent:
                self._drop(connection)
            else:
                self._listen(connection)
        except BlockingIOError:
            self._listen(connection)
        except OSError as error:  # it has left
            logger.debug("A peer's connection ended: %s", error)
            self._drop(connection)
        except BaseException:
            self._drop(connection)
            raise

    def _answer_next(self, connection: _Connection) -> bool:
        """Queue the answers to commands that are there and may be answered. False: none."""
        num_answered = 0
        while num_answered < _MAX_ANSWERS and self._may_answer(connection):
            try:
                words = connection.held
                if words is None and not connection.is_ending:
                    words = connection.parser.next()
                connection.has_more = words is not None
                if words is None:
                    break
                is_last = words[0].upper() == b"QUIT"
                reply = OK if is_last else self._commands.answer(connection.client, words)
            except ProtocolError as error:
                reply, is_last = Reply((f"-ERR {error}\r\n".encode(),)), True
            if reply.is_early and self._may_wait(connection, words):
                connection.has_more = False
                break
            connection.held = None
            connection.is_ending |= is_last
            if reply.releases:
                self._release_all(connection)
            for lease in reply.held:
                connection.leases.append(lease)
                self._leased_bytes += len(lease.view)
            self._queue(connection, reply)
            num_answered += 1
        if num_answered:
            connection.has_asked, connection.moved_at = True, self._clock()
            # Once there is room again, those have a turn first that have waited longer.
            self._connections[connection.sock] = self._connections.pop(connection.sock)
        return num_answered > 0

    def _may_wait(self, connection: _Connection, words: list[bytes] | None) -> bool:
        """Whether the client waits for a later answer. Who says more does not."""
        now = self._clock()
        if connection.held is None and words is not None:
            connection.held = words
            connection.held_until = now + self._commands.patience(words)
        return now < connection.held_until and not connection.parser.num_bytes

    def _may_answer(self, connection: _Connection) -> bool:
        self._has_held_up |= self._is_full
        has_room = connection.unsent_bytes < self._limits.unsent_bytes
        has_room &= len(connection.unsent) < _MAX_PARTS
        return has_room and (not self._is_full or bool(connection.leases))  # it may let go

    def _queue(self, connection: _Connection, reply: Reply) -> None:
        if reply.descriptor is not None:
            if connection.unsent:
                raise OSError("a descriptor goes with a first answer")
            socket.send_fds(connection.sock, list(reply.parts), [reply.descriptor])
            return
        parts = [memoryview(part) for part in reply.parts if part]
        for part in parts[:-1]:
            connection.unsent.append((part, None))
        connection.unsent.append((parts[-1], reply.lease))
        connection.unsent_bytes += sum(map(len, parts))
        if reply.lease is not None:
            self._leased_bytes += len(reply.lease.view)

    def _send(self, connection: _Connection) -> None:
        """As much as the socket takes now, straight from where the chunks lie. Raises ``OSError``,
        or ``BlockingIOError`` if it takes nothing."""
        while connection.unsent:
            views = [view for view, _ in islice(connection.unsent, _MAX_VECTORS)]
            num_bytes = connection.sock.sendmsg(views)
            connection.unsent_bytes -= num_bytes
            connection.taken_bytes += num_bytes
            least = self._limits.unsent_bytes if self._is_full else _LEAST_BYTES
            if connection.taken_bytes >= least or not connection.unsent_bytes:
                connection.moved_at, connection.taken_bytes = self._clock(), 0
            while num_bytes:
                view, lease = connection.unsent[0]
                if num_bytes < len(view):
                    connection.unsent[0] = view[num_bytes:], lease
                    break
                num_bytes -= len(view)
                connection.unsent.popleft()
                self._release(lease)

    def _listen(self, connection: _Connection) -> None:
        """For what can go on. A client that has said much is not heard before it is answered."""
        may_hear = connection.parser.num_bytes <= MAX_COMMAND_BYTES and not connection.is_ending
        may_hear &= self._may_answer(connection)
        has_turn = connection.unsent or (connection.has_more and self._may_answer(connection))
        events = (selectors.EVENT_READ if may_hear else 0) | (
            selectors.EVENT_WRITE if has_turn else 0
        )
        known = self._selector.get_map().get(connection.sock)
        if known is None:
            if events:
                self._selector.register(connection.sock, events)
        elif not events:
            self._selector.unregister(connection.sock)
        elif known.events != events:
            self._selector.modify(connection.sock, events)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.sock, None) is None:
            return
        for _, lease in connection.unsent:
            self._release(lease)
        connection.unsent.clear()
        self._release_all(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()

    def _release_all(self, connection: _Connection) -> None:
        while connection.leases:
            self._release(connection.leases.pop())

    def _release(self, lease: Lease | None) -> None:
        if lease is not None:
            self._leased_bytes -= len(lease.view)
            lease.release()


def _user_of(sock: socket.socket) -> int:
    """Whose process is at the other end of a Unix socket."""
    said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(said)[1]
    return user


def listen(host: str, port: int) -> socket.socket:
    """On any free ``port`` if it is 0. Raises ``OSError``."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # IPv4 where a name has both.
    family, _, _, _, place = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return socket.create_server(place[:2], family=family, backlog=128)
