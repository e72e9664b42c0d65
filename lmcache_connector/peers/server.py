"""Serves the chunks of one rank's CPU tier to all clients, on one thread.

Each client's unparsed input, unsent replies and time without progress on them are bounded. While
leased chunks exceed their limit, only clients with a ``LEASE`` are answered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
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
from lmcache_connector.peers.commands import OK, Client, Commands, Lease, Reply
from lmcache_connector.peers.host import HostSocket
from lmcache_connector.storage.redis.client.resp import (
    MAX_COMMAND_BYTES,
    CommandParser,
    ProtocolError,
)
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

# Between checks: of clients with unfinished work; of KV transfer leases and the host socket.
_POLL_SECONDS, _IDLE_SECONDS = 0.1, 1.0
_READ_BYTES = 1 << 16
_MAX_VECTORS = 256
# Unsent parts per client: small replies cost more than their bytes.
_MAX_PARTS = 4096
# Replies to one client per turn, for fairness: small commands cost more than their bytes.
_MAX_ANSWERS = 64
# A client that reads less in ``stall_seconds`` counts as stalled. While leased chunks exceed their
# limit, it must read ``unsent_bytes``.
_LEAST_BYTES = 64 << 10
_CREDENTIALS = struct.Struct("@iII")  # process, user, group


def _quarter_of_descriptors() -> int:
    """At most 1,024. An engine opens four or more connections to each rank of its peers."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(most // 4, 1024) if most > 0 else 1024  # -1 is unlimited


@dataclass(frozen=True, slots=True)
class Limits:
    """``unsent_bytes`` of replies per client, ``leased_bytes`` of chunks for all clients together.
    A client is dropped after ``stall_seconds`` with half a command, with leases and no further
    command, or with hardly any bytes read."""

    num_clients: int = field(default_factory=_quarter_of_descriptors)
    unsent_bytes: int = 16 << 20
    leased_bytes: int = 256 << 20
    stall_seconds: float = 5.0


@dataclass(slots=True, eq=False)
class _Connection:
    """``unsent``: parts of replies; the last part of a reply carries its lease. ``leases``: chunks
    that the client copies out of our memory, by reply. ``last_progress_at``: the last complete
    command or progress of sending. ``held``: a command whose reply waits till ``held_until``."""

    sock: socket.socket
    last_progress_at: float
    parser: CommandParser = field(default_factory=CommandParser)
    client: Client = field(default_factory=Client)
    leases: list[tuple[Lease, ...]] = field(default_factory=list)
    unsent: deque[tuple[memoryview, Lease | None]] = field(default_factory=deque)
    unsent_bytes: int = 0
    taken_bytes: int = 0  # since ``last_progress_at``
    has_asked: bool = False
    held: list[bytes] | None = None
    held_until: float = 0.0
    has_more: bool = False  # complete commands may be waiting in the parser
    is_ending: bool = False  # close once everything is sent


class PeerServer:
    """Serves and finally closes ``listeners`` and ``host_socket``. ``clock`` returns seconds."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        commands: Commands,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        host_socket: HostSocket | None = None,
    ) -> None:
        self._host_socket, self._next_look = host_socket, clock()
        self._commands = commands
        self._limits = limits or Limits()
        self._clock = clock
        self._connections: dict[socket.socket, _Connection] = {}
        self._leased_bytes = 0
        self._has_held_up = False  # this turn, too much was leased to answer every client
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._listeners = list[socket.socket]()
        for listener in (*listeners, *([host_socket.sock] if host_socket is not None else [])):
            self._listen_at(listener)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = start_thread("lmc-peer-server", self._serve)

    @property
    def has_host_socket(self) -> bool:
        """Whether engines on this host can find this server by its socket name."""
        return self._host_socket is not None

    @property
    def port(self) -> int:
        """Port of the first listener."""
        return int(self._listeners[0].getsockname()[1])

    def recheck_held_commands(self) -> None:
        """Re-evaluate commands whose reply is delayed. Thread-safe."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def close(self, seconds: float) -> bool:
        """False if the thread is still running after ``seconds``: it may still read chunks."""
        self._stopping.set()
        self.recheck_held_commands()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- the server's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except Exception:  # keep serving
                    logger.exception("The peer server met an error")
                    self._stopping.wait(_POLL_SECONDS)  # no busy loop if every turn fails
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            for sock in (*self._listeners, self._wake, self._woken):
                sock.close()
            self._selector.close()
            if self._host_socket is not None:
                self._host_socket.close()

    def _listen_at(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._listeners.append(listener)

    def _maintain_host_socket(self, now: float) -> None:
        if self._host_socket is None or now < self._next_look:
            return
        self._next_look = now + _IDLE_SECONDS
        if (old := self._host_socket.renew()) is not None:
            self._listeners.remove(old)
            self._selector.unregister(old)
            old.close()
            self._listen_at(self._host_socket.sock)

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
                connection.last_progress_at = now  # the server delays it
            waits_for_it = connection.unsent or connection.parser.num_bytes or connection.leases
            if waits_for_it and now - connection.last_progress_at > self._limits.stall_seconds:
                self._drop(connection)
            elif connection.held is not None and (was_woken or now >= connection.held_until):
                self._attend(connection, 0)
        if (was_full or self._has_held_up) and not self._is_full:
            for connection in list(self._connections.values()):
                self._attend(connection, 0)
        self._commands.maintain()
        self._maintain_host_socket(now)

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
            self._stopping.wait(_POLL_SECONDS)  # out of descriptors: select() would return at once
            return
        try:
            sock.setblocking(False)
            is_local = sock.family == socket.AF_UNIX
            if not is_local:
                keep_alive(sock)
            elif _user_of(sock) not in (0, os.geteuid()):
                raise ValueError("it belongs to another user")
            self._selector.register(sock, selectors.EVENT_READ)
        except (OSError, ValueError) as error:
            logger.debug("A peer was not accepted: %s", error)
            sock.close()
            return
        self._connections[sock] = _Connection(sock, self._clock(), client=Client(is_local))
        if len(self._connections) > self._limits.num_clients:
            # A client that never sent a command is dropped first.
            others = list(self._connections.values())[:-1]
            self._drop(min(others, key=lambda each: (each.has_asked, each.last_progress_at)))

    def _attend(self, connection: _Connection, events: int) -> None:
        """Read commands, answer them, send what the socket takes."""
        try:
            if events & selectors.EVENT_READ:
                data = connection.sock.recv(_READ_BYTES)
                if not data:
                    self._drop(connection)
                    return
                if not connection.parser.num_bytes:
                    connection.last_progress_at = self._clock()
                connection.parser.feed(data)
            self._send(connection)
            if self._answer_next(connection):
                self._send(connection)  # further commands wait for the next turn
            if connection.is_ending and not connection.unsent:
                self._drop(connection)
            else:
                self._listen(connection)
        except BlockingIOError:
            self._listen(connection)
        except OSError as error:  # disconnected
            logger.debug("A peer's connection ended: %s", error)
            self._drop(connection)
        except BaseException:
            self._drop(connection)
            raise

    def _answer_next(self, connection: _Connection) -> bool:
        """Queue replies to complete commands. False if there was none."""
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
            if reply.kept is not None:
                self._release_all_but(reply.kept, connection)
            if reply.held:
                connection.leases.append(reply.held)
                self._leased_bytes += sum(len(lease.view) for lease in reply.held)
            self._queue(connection, reply)
            num_answered += 1
        if num_answered:
            connection.has_asked, connection.last_progress_at = True, self._clock()
            # Move to the end: when leases free up, the longest waiting client comes first.
            self._connections[connection.sock] = self._connections.pop(connection.sock)
        return num_answered > 0

    def _may_wait(self, connection: _Connection, words: list[bytes] | None) -> bool:
        """Whether to delay the reply. A client that has sent another command does not wait."""
        now = self._clock()
        if connection.held is None and words is not None:
            connection.held = words
            connection.held_until = now + self._commands.max_wait_seconds(words)
        return now < connection.held_until and not connection.parser.num_bytes

    def _may_answer(self, connection: _Connection) -> bool:
        self._has_held_up |= self._is_full
        has_room = connection.unsent_bytes < self._limits.unsent_bytes
        has_room &= len(connection.unsent) < _MAX_PARTS
        return has_room and (not self._is_full or bool(connection.leases))  # it may RELEASE

    def _queue(self, connection: _Connection, reply: Reply) -> None:
        if reply.descriptor is not None:
            if connection.unsent:
                raise OSError("it asked for a descriptor before it had read earlier replies")
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
        """Send what the socket takes, directly from the chunks' memory. Raises ``OSError``;
        ``BlockingIOError`` if the socket takes nothing."""
        while connection.unsent:
            views = [view for view, _ in islice(connection.unsent, _MAX_VECTORS)]
            num_bytes = connection.sock.sendmsg(views)
            connection.unsent_bytes -= num_bytes
            connection.taken_bytes += num_bytes
            least = self._limits.unsent_bytes if self._is_full else _LEAST_BYTES
            if connection.taken_bytes >= least or not connection.unsent_bytes:
                connection.last_progress_at, connection.taken_bytes = self._clock(), 0
            while num_bytes:
                view, lease = connection.unsent[0]
                if num_bytes < len(view):
                    connection.unsent[0] = view[num_bytes:], lease
                    break
                num_bytes -= len(view)
                connection.unsent.popleft()
                self._release(lease)

    def _listen(self, connection: _Connection) -> None:
        """Register for the events that allow progress. Much unparsed input stops reading."""
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
        self._release_all_but(0, connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()

    def _release_all_but(self, num_last: int, connection: _Connection) -> None:
        while len(connection.leases) > num_last:
            for lease in connection.leases.pop(0):
                self._release(lease)

    def _release(self, lease: Lease | None) -> None:
        if lease is not None:
            self._leased_bytes -= len(lease.view)
            lease.release()


def _user_of(sock: socket.socket) -> int:
    """User id of the process at the other end of a Unix socket."""
    said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(said)[1]
    return user


def listen(host: str, port: int) -> socket.socket:
    """``port`` 0 picks a free one. Raises ``OSError``."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # Prefer IPv4.
    family, _, _, _, place = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return socket.create_server(place[:2], family=family, backlog=128)
