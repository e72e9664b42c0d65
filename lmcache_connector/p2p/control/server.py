"""The control plane's server: one ZeroMQ socket per rank, answered from one thread.

A client introduces itself, proves that it knows the secret, and then asks one question after the
other. Handlers run on the server's thread, so they must not wait for anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.handshake import SessionKey, Transcript, proves
from lmcache_connector.p2p.control.messages import Card, Message, Packet
from lmcache_connector.p2p.control.peers import Peer, check_peer
from lmcache_connector.p2p.errors import PeerError, RefusedError
from lmcache_connector.p2p.reasons import Reason

logger = logging.getLogger(__name__)

_POLL_MILLISECONDS = 100
_MAX_SESSIONS = 4096
_MAX_PENDING = 256
_SESSION_BYTES = 16

Handler = Callable[[Peer, Message], Message]
"""Answers at once. Runs on the server's thread."""


@dataclass(slots=True)
class _Pending:
    """A client that has said hello and not yet proved itself."""

    card: Card
    transcript: Transcript


@dataclass(slots=True)
class _Session:
    peer: Peer
    key: SessionKey


def bound_socket(
    context: zmq.Context[zmq.Socket[bytes]], host: str, port: int
) -> zmq.Socket[bytes]:
    """What a server listens on. Raises ``PeerError`` if the port is taken, or ``host`` unknown."""
    interface = _interface(host)
    server = context.socket(zmq.ROUTER)
    server.setsockopt(zmq.LINGER, 0)
    server.setsockopt(zmq.MAXMSGSIZE, messages.MAX_PACKET_BYTES)
    server.setsockopt(zmq.IPV6, ":" in interface)
    try:
        server.bind(f"tcp://{PeerAddress(interface, port)}")
    except zmq.ZMQError as error:
        server.close()
        raise PeerError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return server


def _interface(host: str) -> str:
    """The address of a host name: ZeroMQ binds to addresses and names of devices only."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise PeerError(f"cannot listen on {host}: {error.strerror or error}") from error
    # IPv4 where a name has both, as on the data plane.
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


class ControlServer:
    """Listens on ``host:port`` at once. Raises ``PeerError`` if the port is taken."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        card: Card,
        secret: bytes,
        handle: Handler,
    ) -> None:
        self._card = card
        self._secret = secret
        self._handle = handle
        self._lock = threading.Lock()
        # Both by ZeroMQ's routing id, the one silent longest first. A client that never proves
        # itself must not displace one that has.
        self._pending: OrderedDict[bytes, _Pending] = OrderedDict()
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._admitted: dict[bytes, Peer] = {}  # by session name
        self._stopping = threading.Event()
        self._socket = bound_socket(context, host, port)
        self._thread = threading.Thread(target=self._serve, name="lmc-p2p-control", daemon=True)
        self._thread.start()

    def peer_of_session(self, session: bytes) -> Peer | None:
        """The rank that a session belongs to, for the data plane."""
        with self._lock:
            return self._admitted.get(session)

    def close(self, seconds: float) -> None:
        self._stopping.set()
        self._thread.join(seconds)

    # -- the server's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        with contextlib.closing(self._socket):
            while not self._stopping.is_set():
                try:
                    if not self._socket.poll(_POLL_MILLISECONDS):
                        continue
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.ContextTerminated:
                    return
                except zmq.ZMQError as error:
                    logger.debug("A control message was lost: %s", error)
                    continue
                if len(frames) == 2:
                    self._reply(frames[0], self._answer(frames[0], frames[1]))

    def _reply(self, route: bytes, packet: bytes) -> None:
        try:
            self._socket.send_multipart([route, packet], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it has left, or does not read
            logger.debug("A control answer was not delivered: %s", error)

    def _answer(self, route: bytes, data: bytes) -> bytes:
        sequence = 0
        try:
            packet = messages.unpack(data)
            sequence = packet.sequence
            session = self._sessions.get(route)
            if session is not None:
                self._sessions.move_to_end(route)
                return self._continue(session, packet)
            message = messages.decode(packet.body)
            pending = self._pending.pop(route, None)
            if isinstance(message, messages.Hello):
                return messages.pack(sequence, self._welcome(route, message, packet))
            if isinstance(message, messages.Prove) and pending is not None:
                return messages.pack(sequence, self._admit(route, pending, message))
            raise RefusedError("say hello first")
        except PeerError as error:
            return messages.pack(sequence, messages.encode(messages.Refused(error.cause.to_wire())))

    def _welcome(self, route: bytes, hello: messages.Hello, packet: Packet) -> bytes:
        check_peer(self._card, hello.card)
        nonce = os.urandom(messages.NONCE_BYTES)
        transcript = Transcript.of(packet.body, nonce, messages.encode(self._card))
        self._pending[route] = _Pending(hello.card, transcript)
        if len(self._pending) > _MAX_PENDING:
            self._pending.popitem(last=False)
        return messages.encode(
            messages.Welcome(nonce, self._card, transcript.server_proof(self._secret))
        )

    def _admit(self, route: bytes, pending: _Pending, message: messages.Prove) -> bytes:
        if not proves(message.proof, pending.transcript.client_proof(self._secret)):
            raise RefusedError("you do not know the shared secret")
        key = SessionKey(pending.transcript.session_key(self._secret), is_server=True)
        session = os.urandom(_SESSION_BYTES)
        peer = Peer(pending.card, session, key.data_key)
        self._sessions[route] = _Session(peer, key)
        with self._lock:
            self._admitted[session] = peer
            if len(self._sessions) > _MAX_SESSIONS:
                _, oldest = self._sessions.popitem(last=False)
                del self._admitted[oldest.peer.session]
        return messages.encode(messages.Admitted(session))

    def _continue(self, session: _Session, packet: Packet) -> bytes:
        if not session.key.accepts(packet):
            raise RefusedError("this packet is not of our session")
        message = messages.decode(packet.body)
        try:
            answer = self._handle(session.peer, message)
        except Exception:  # one question must not end the server
            logger.exception("A control message of kind %s failed", type(message).__name__)
            answer = messages.Refused.of("an error inside, see my log", Reason.OTHER)
        return session.key.seal(packet.sequence, messages.encode(answer))
