"""The data plane over TCP, without a copy on either side.

A frame leaves in one ``sendmsg`` from the memory its blocks were copied to, and its payload is
received straight into the memory they will be copied from, in calls that release the GIL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.keepalive import keep_alive
from lmcache_connector.net.wire import Wire, WireError
from lmcache_connector.p2p.control.handshake import (
    WELCOME_BYTES,
    answer,
    frame_key,
    proves,
    welcome,
)
from lmcache_connector.p2p.control.sockets import connected_socket, listening_socket
from lmcache_connector.p2p.data.base import KeyOf, Landing, Session, Sink
from lmcache_connector.p2p.data.frame import HEAD_BYTES, Frame, FrameKey, unpack_head
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

_MAGIC = b"LMPD"
_VERSION = 2
_CHALLENGE_BYTES = 32
_GREETING = struct.Struct("<4sH16s32s")
_HANDSHAKE_SECONDS = 2.0
_POLL_MILLISECONDS = 100
_MAX_CONNECTIONS = 1024
_MAX_STRANGERS = 64
_EVICTION_SECONDS = 0.5
_SCRATCH_BYTES = 256 << 10
_FOREVER_SECONDS = 1e9


def no_deadline(clock: Callable[[], float]) -> Deadline:
    """For a wire that notices a stall by itself."""
    return Deadline(clock() + _FOREVER_SECONDS, clock)


class TcpTransport:
    """``stall_seconds``: how long a connection may go without a byte while it owes some."""

    def __init__(self, stall_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = "tcp"
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        # Those of them that have not proved themselves, the oldest first.
        self._strangers: dict[socket.socket, threading.Thread] = {}
        self._sessions: set[bytes] = set()  # those that have a connection
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    def listen(self, host: str, port: int, sink: Sink, key_of: KeyOf) -> int:
        self._listener = listening_socket(host, port)
        self._acceptor = start_thread("lmc-p2p-accept", self._accept, self._listener, sink, key_of)
        bound: int = self._listener.getsockname()[1]
        return bound

    def connect(self, host: str, port: int, session: Session, seconds: float) -> TcpOutlet:
        deadline = Deadline(self._clock() + seconds, self._clock)
        wire = Wire(connected_socket(host, port, seconds), self._clock, self._stall_seconds)
        try:
            challenge, welcomed = bytearray(_CHALLENGE_BYTES), bytearray(WELCOME_BYTES)
            wire.receive([memoryview(challenge)], deadline)
            proof = answer(session.key, bytes(challenge))
            wire.send([_GREETING.pack(_MAGIC, _VERSION, session.name, proof)], deadline)
            wire.receive([memoryview(welcomed)], deadline)
        except WireError as error:
            wire.close()
            raise PeerError(f"{host}:{port} let no data connection in: {error}") from error
        key = frame_key(session.key, bytes(challenge))
        try:
            if not proves(welcomed, welcome(key)):
                raise PeerError(f"who listens at {host}:{port} is not the peer of this session")
            path = self._sending_path(wire, key)
        except PeerError:
            wire.close()
            raise
        return TcpOutlet(wire, path, FrameKey(key))

    def close(self, seconds: float) -> None:
        self._stopping.set()
        end = self._clock() + seconds
        with self._lock:
            connections = dict(self._connections)
        for sock in connections:
            with contextlib.suppress(OSError):  # it may have gone by itself
                sock.shutdown(socket.SHUT_RDWR)
        for thread in (*connections.values(), self._acceptor):
            if thread is not None:
                thread.join(max(0.0, end - self._clock()))

    # -- how payloads cross, once a connection is let in ---------------------------------------

    def _sending_path(self, wire: Wire, key: bytes) -> PayloadPath:
        """``key``: of this connection's frames. Raises ``PeerError``."""
        return WirePath(wire, self._clock)

    def _receiving_path(self, wire: Wire, key: bytes) -> PayloadPath:
        """Raises ``PeerError`` or ``WireError``."""
        return WirePath(wire, self._clock)

    # -- the acceptor's thread -----------------------------------------------------------------

    def _accept(self, listener: socket.socket, sink: Sink, key_of: KeyOf) -> None:
        with listener:
            while not self._stopping.is_set():
                try:
                    if _readable(listener):
                        sock, _ = listener.accept()
                        self._start(sock, sink, key_of)
                except (OSError, RuntimeError, MemoryError) as error:
                    # Out of descriptors, threads or memory: that passes.
                    logger.warning("A data connection was not accepted: %s", error)
                    self._stopping.wait(_POLL_MILLISECONDS / 1000)

    def _start(self, sock: socket.socket, sink: Sink, key_of: KeyOf) -> None:
        """Serve a connection on a thread of its own. Raises ``RuntimeError`` if none starts."""
        thread = threading.Thread(
            target=self._serve, args=(sock, sink, key_of), name="lmc-p2p-receive", daemon=True
        )
        self._make_room_for_a_stranger()
        with self._lock:
            if len(self._connections) >= _MAX_CONNECTIONS:
                sock.close()
                return
            self._connections[sock] = self._strangers[sock] = thread
        try:
            thread.start()
        except BaseException:
            self._forget(sock)
            sock.close()
            raise

    def _make_room_for_a_stranger(self) -> None:
        """End the oldest: whoever means it has proved himself long before. Nobody may keep others
        out by saying nothing."""
        with self._lock:
            if len(self._strangers) < _MAX_STRANGERS:
                return
            oldest = next(iter(self._strangers))
            thread = self._strangers.pop(oldest)
            with contextlib.suppress(OSError):  # it may have gone by itself
                oldest.shutdown(socket.SHUT_RDWR)
        thread.join(_EVICTION_SECONDS)  # so that there are no more threads than strangers

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._connections.pop(sock, None)
            self._strangers.pop(sock, None)

    # -- one thread per connection -------------------------------------------------------------

    def _serve(self, sock: socket.socket, sink: Sink, key_of: KeyOf) -> None:
        wire = Wire(sock, self._clock, self._stall_seconds)
        session: bytes | None = None
        path: PayloadPath | None = None
        cause = Cause(Reason.LOST, "the connection ended")
        try:
            keep_alive(sock)
            session, key = self._let_in(wire, key_of)
            with self._lock:
                self._strangers.pop(sock, None)
            wire.send([welcome(key)], no_deadline(self._clock))
            path = self._receiving_path(wire, key)
            self._receive(sock, wire, path, session, FrameKey(key), sink)
        except (WireError, OSError) as error:
            cause = Cause(Reason.LOST, str(error))
        except PeerError as error:
            cause = error.cause
            logger.warning("A data connection was cut: %s", error)
        except Exception as error:  # it costs the connection
            cause = Cause(Reason.LOST, f"an error inside: {type(error).__name__}")
            logger.exception("A data connection was cut")
        finally:
            if path is not None:
                path.close()
            wire.close()
            self._forget(sock)
            if session is not None:
                with self._lock:
                    self._sessions.discard(session)
                sink.lost(session, cause)

    def _let_in(self, wire: Wire, key_of: KeyOf) -> tuple[bytes, bytes]:
        """The session's name, and the key of this connection's frames."""
        deadline = Deadline(self._clock() + _HANDSHAKE_SECONDS, self._clock)
        challenge = os.urandom(_CHALLENGE_BYTES)
        greeting = bytearray(_GREETING.size)
        wire.send([challenge], deadline)
        wire.receive([memoryview(greeting)], deadline)
        magic, version, name, proof = _GREETING.unpack(greeting)
        if magic != _MAGIC or version != _VERSION:
            raise PeerError("a stranger or another version on the data port")
        key = key_of(name)
        if key is None or not proves(proof, answer(key, challenge)):
            raise PeerError("a data connection without a session")
        with self._lock:
            if name in self._sessions:
                raise PeerError("a second data connection of one session")
            self._sessions.add(name)
        return name, frame_key(key, challenge)

    def _receive(
        self,
        sock: socket.socket,
        wire: Wire,
        path: PayloadPath,
        session: bytes,
        key: FrameKey,
        sink: Sink,
    ) -> None:
        head = bytearray(HEAD_BYTES)
        while not self._stopping.is_set():
            if not _readable(sock):
                continue
            wire.receive([memoryview(head)], self._deadline())
            frame_head = unpack_head(bytes(head))
            tail = bytearray(frame_head.tail_bytes)
            wire.receive([memoryview(tail)], self._deadline())
            self._receive_payload(path, session, sink, key.open(frame_head, bytes(tail)))

    def _receive_payload(self, path: PayloadPath, session: bytes, sink: Sink, frame: Frame) -> None:
        landing = sink.land(session, frame)
        if landing is None:
            path.discard(frame.num_bytes, self._deadline())
            return
        with _given_back(sink, landing):
            path.receive(landing.views, self._deadline())

    def _deadline(self) -> Deadline:
        """No limit as long as bytes keep coming: the wire itself notices a stall."""
        return Deadline(
            self._clock() + _FOREVER_SECONDS, self._clock, cancelled=self._stopping.is_set
        )


class TcpOutlet:
    """See :class:`~lmcache_connector.p2p.data.base.Outlet`."""

    def __init__(self, wire: Wire, path: PayloadPath, key: FrameKey) -> None:
        self._wire = wire
        self._path = path
        self._key = key

    def send(self, frame: Frame, views: Sequence[memoryview]) -> None:
        try:
            self._path.send(self._key.seal(frame), views)
        except WireError as error:
            raise PeerError(f"the data connection broke: {error}", Reason.LOST) from error

    def close(self) -> None:
        self._path.close()
        self._wire.close()


class PayloadPath(Protocol):
    """One side of how the payload of frames crosses, for one connection. Raises ``PeerError`` or
    ``WireError``; then the connection is of no more use."""

    def send(self, head: bytes, views: Sequence[memoryview]) -> None:
        """A whole frame: its head goes over the wire in any case."""

    def receive(self, views: Sequence[memoryview], deadline: Deadline) -> None: ...

    def discard(self, num_bytes: int, deadline: Deadline) -> None:
        """Let the payload of a frame pass by."""

    def close(self) -> None: ...


class WirePath:
    """Payload behind its head, on the same connection."""

    def __init__(self, wire: Wire, clock: Callable[[], float]) -> None:
        self._wire = wire
        self._clock = clock

    def send(self, head: bytes, views: Sequence[memoryview]) -> None:
        self._wire.send([head, *views], no_deadline(self._clock))

    def receive(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        self._wire.receive(views, deadline)

    def discard(self, num_bytes: int, deadline: Deadline) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        while num_bytes > 0:
            self._wire.receive([scratch[:num_bytes]], deadline)
            num_bytes -= len(scratch)

    def close(self) -> None:
        """The wire is closed by its owner."""


@contextlib.contextmanager
def _given_back(sink: Sink, landing: Landing) -> Iterator[None]:
    complete = False
    try:
        yield
        complete = True
    finally:
        sink.landed(landing, complete=complete)


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(_POLL_MILLISECONDS))
