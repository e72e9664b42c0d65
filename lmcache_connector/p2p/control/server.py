"""The control plane's server: one listening socket per rank, all of its clients on one thread.

A client introduces itself, proves that it knows the secret, and then asks one question after the
other. Handlers run on the server's thread, so they must not wait for anything. What a client may
cost is bounded: the bytes it sends ahead, its time to prove itself, and how many there are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_connector.net.keepalive import keep_alive
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.handshake import SessionKey, Transcript, proves
from lmcache_connector.p2p.control.messages import Card, Message, Packet
from lmcache_connector.p2p.control.peers import Peer, check_peer
from lmcache_connector.p2p.control.sockets import listening_socket
from lmcache_connector.p2p.errors import PeerError, RefusedError
from lmcache_connector.p2p.reasons import Reason
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_HANDSHAKE_SECONDS = 5.0
_IDLE_SECONDS = 300.0
_MAX_SESSIONS = 4096
_MAX_STRANGERS = 128
_SESSION_BYTES = 16
_READ_BYTES = 1 << 16

Handler = Callable[[Peer, Message], Message]
"""Answers at once. Runs on the server's thread."""


@dataclass(slots=True)
class _Pending:
    """A client that has said hello and not yet proved itself."""

    card: Card
    transcript: Transcript
    dialled: PeerAddress


@dataclass(slots=True)
class _Session:
    peer: Peer
    key: SessionKey


@dataclass(slots=True, eq=False)
class _Client:
    """A connection. ``until``: when it is closed, unless it says something before. ``unsent``: the
    end of an answer that its socket has not taken yet. ``greeted``: it has said hello, which takes
    more work to answer than to say."""

    sock: socket.socket
    until: float
    received: bytearray = field(default_factory=bytearray)
    unsent: bytes = b""
    greeted: bool = False
    pending: _Pending | None = None
    session: _Session | None = None

    def next_packet(self) -> Packet | None:
        """Raises ``ProtocolError``, also for a length that will not be received."""
        if len(self.received) < messages.HEAD_BYTES:
            return None
        head = messages.unpack_head(bytes(self.received[: messages.HEAD_BYTES]))
        end = messages.HEAD_BYTES + head.num_bytes
        if len(self.received) < end:
            return None
        body = bytes(self.received[messages.HEAD_BYTES : end])
        del self.received[:end]
        return head.with_body(body)


class ControlServer:
    """Listens on ``host:port`` at once. Raises ``PeerError`` if the port is taken. ``may_be_at``:
    whether a peer may dial from an address; others are not listened to."""

    def __init__(
        self,
        host: str,
        port: int,
        card: Card,
        secret: bytes,
        handle: Handler,
        clock: Callable[[], float] = time.monotonic,
        may_be_at: Callable[[str], bool] = lambda address: True,
    ) -> None:
        self._may_be_at = may_be_at
        self._card = card
        self._secret = secret
        self._handle = handle
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, _Client] = {}  # the oldest first
        self._admitted: dict[bytes, Peer] = {}  # by session name
        self._stopping = threading.Event()
        self._listener = listening_socket(host, port)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = start_thread("lmc-p2p-control", self._serve)

    def introduce_as(self, card: Card) -> None:
        """From now on clients are shown this card."""
        self._card = card

    def peer_of_session(self, session: bytes) -> Peer | None:
        """The rank that a session belongs to, for the data plane."""
        with self._lock:
            return self._admitted.get(session)

    def close(self, seconds: float) -> None:
        self._stopping.set()
        self._thread.join(seconds)

    # -- the server's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except Exception:  # it must not end the server
                    logger.exception("The control server met an error")
                    self._stopping.wait(_POLL_SECONDS)  # it may be one of every turn
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self._listener.close()
            self._selector.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.fileobj is self._listener:
                self._accept()
            elif (client := self._clients.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                if client.unsent:
                    self._go_on(client)
                else:
                    self._attend(client)
        now = self._clock()
        for client in [c for c in self._clients.values() if c.until <= now]:
            self._drop(client)

    def _accept(self) -> None:
        try:
            sock, (address, *_) = self._listener.accept()
        except OSError as error:
            logger.debug("A control connection was not accepted: %s", error)
            self._stopping.wait(_POLL_SECONDS)  # out of descriptors: it would be ready at once
            return
        try:
            if not self._may_be_at(address):
                raise OSError(f"{address} is not among the peers of this instance")
            sock.setblocking(False)
            keep_alive(sock)
            self._selector.register(sock, selectors.EVENT_READ)
        except (OSError, ValueError) as error:
            logger.debug("A control connection was not accepted: %s", error)
            sock.close()
            return
        self._clients[sock] = _Client(sock, self._clock() + _HANDSHAKE_SECONDS)
        # A client that never proves itself must not displace one that has.
        strangers = [c for c in self._clients.values() if c.session is None]
        if len(strangers) > _MAX_STRANGERS:
            self._drop(strangers[0])

    def _attend(self, client: _Client) -> None:
        """Take what a client has sent, and answer it."""
        try:
            data = client.sock.recv(_READ_BYTES)
            if not data:
                self._drop(client)
                return
            client.received += data
            while (packet := client.next_packet()) is not None:
                self._reply(client, self._answer(client, packet))
        except PeerError as error:
            with contextlib.suppress(OSError):
                refusal = messages.encode(messages.Refused(error.cause.to_wire()))
                self._reply(client, messages.pack(0, refusal))
            self._drop(client)
        except BlockingIOError:
            pass  # nothing has come
        except OSError as error:  # it has left, or does not read
            logger.debug("A control connection ended: %s", error)
            self._drop(client)

    def _go_on(self, client: _Client) -> None:
        """Its socket takes more of a long answer."""
        try:
            self._send(client, client.unsent)
        except OSError as error:
            logger.debug("A control connection ended: %s", error)
            self._drop(client)

    def _reply(self, client: _Client, packet: bytes) -> None:
        """Raises ``OSError`` for a client that asks on while it does not read."""
        if client.unsent:
            raise OSError("a client does not read")
        self._send(client, packet)

    def _send(self, client: _Client, data: bytes) -> None:
        """What the socket does not take at once, as soon as it does: until then nothing more is
        heard from the client."""
        try:
            client.unsent = data[client.sock.send(data) :]
        except BlockingIOError:
            client.unsent = data
        events = selectors.EVENT_WRITE if client.unsent else selectors.EVENT_READ
        self._selector.modify(client.sock, events)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.sock, None) is None:
            return
        self._selector.unregister(client.sock)
        client.sock.close()
        if client.session is not None:
            with self._lock:
                self._admitted.pop(client.session.peer.session, None)

    # -- what is said --------------------------------------------------------------------------

    def _answer(self, client: _Client, packet: Packet) -> bytes:
        """Raises ``PeerError`` to end the connection with a refusal."""
        if client.session is not None:
            client.until = self._clock() + _IDLE_SECONDS
            return self._continue(client.session, packet)
        message = messages.decode(packet.body)
        pending, client.pending = client.pending, None
        if isinstance(message, messages.Hello) and not client.greeted:
            client.greeted = True
            return messages.pack(packet.sequence, self._welcome(client, message, packet))
        if isinstance(message, messages.Prove) and pending is not None:
            return messages.pack(packet.sequence, self._admit(client, pending, message))
        raise RefusedError("say hello first")

    def _welcome(self, client: _Client, hello: messages.Hello, packet: Packet) -> bytes:
        nonce = os.urandom(messages.NONCE_BYTES)
        transcript = Transcript.of(packet.body, nonce, messages.encode(self._card))
        dialled = PeerAddress(hello.host, hello.port)
        client.pending = _Pending(hello.card, transcript, dialled)
        return messages.encode(
            messages.Welcome(nonce, self._card, transcript.server_proof(self._secret))
        )

    def _admit(self, client: _Client, pending: _Pending, message: messages.Prove) -> bytes:
        if not proves(message.proof, pending.transcript.client_proof(self._secret)):
            raise RefusedError("you do not know the shared secret")
        check_peer(self._card, pending.card)  # not before: it takes work, and tells of the model
        if pending.dialled != self._card.address:
            raise RefusedError(f"you dialled {pending.dialled}, and I am {self._card.address}")
        if len(self._admitted) >= _MAX_SESSIONS:
            raise RefusedError("there are too many sessions")
        key = SessionKey(pending.transcript.session_key(self._secret), is_server=True)
        session = os.urandom(_SESSION_BYTES)
        peer = Peer(pending.card, session, key.data_key)
        client.session = _Session(peer, key)
        client.until = self._clock() + _IDLE_SECONDS
        with self._lock:
            self._admitted[session] = peer
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
