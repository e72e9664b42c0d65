"""The control plane's client: a session with one peer rank, one question at a time."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import zmq

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.handshake import SessionKey, Transcript, proves
from lmcache_connector.p2p.control.messages import Card, Message, Packet, ProtocolError
from lmcache_connector.p2p.control.peers import Peer, check_peer
from lmcache_connector.p2p.errors import PeerError, RefusedError
from lmcache_connector.p2p.reasons import Reason


class ControlClient:
    """A session with one peer rank. Connecting raises ``PeerError`` and is bounded by ``seconds``.

    Belongs to the thread that made it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: PeerAddress,
        card: Card,
        secret: bytes,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._seconds = seconds
        self._clock = clock
        self._sequence = 0
        _check_listens(address, seconds)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_PACKET_BYTES)
        self._socket.setsockopt(zmq.IPV6, ":" in address.host)
        try:
            self._socket.connect(f"tcp://{address}")
            self.peer, self._key = self._introduce(card, secret)
        except zmq.ZMQError as error:
            self.close()
            raise _unreachable(address, error.strerror or error) from error
        except PeerError:
            self.close()
            raise

    def ask(self, message: Message) -> Message:
        """Raises :class:`RefusedError` for a refusal, ``PeerError`` for silence or nonsense."""
        self._sequence += 1
        packet = self._exchange(self._key.seal(self._sequence, messages.encode(message)))
        if not self._key.accepts(packet):
            # Only a refusal may come without a tag: a peer that was restarted knows no session.
            if isinstance(messages.decode(packet.body), messages.Refused):
                raise PeerError(f"{self._address} has ended the session", Reason.LOST)
            raise ProtocolError(f"{self._address} answered with a packet of another session")
        return self._read(packet)

    def close(self) -> None:
        self._socket.close()

    def _introduce(self, card: Card, secret: bytes) -> tuple[Peer, SessionKey]:
        hello = messages.encode(messages.Hello(os.urandom(messages.NONCE_BYTES), card))
        welcome = self._read(self._exchange(messages.pack(1, hello)))
        if not isinstance(welcome, messages.Welcome):
            raise ProtocolError(f"{self._address} did not answer a hello")
        transcript = Transcript.of(hello, welcome.nonce, messages.encode(welcome.card))
        if not proves(welcome.proof, transcript.server_proof(secret)):
            raise RefusedError(f"{self._address} does not know the shared secret")
        check_peer(card, welcome.card)
        prove = messages.encode(messages.Prove(transcript.client_proof(secret)))
        admitted = self._read(self._exchange(messages.pack(2, prove)))
        if not isinstance(admitted, messages.Admitted):
            raise ProtocolError(f"{self._address} did not finish the handshake")
        self._sequence = 2
        key = SessionKey(transcript.session_key(secret), is_server=False)
        return Peer(welcome.card, admitted.session, key.data_key), key

    def _exchange(self, packet: bytes) -> Packet:
        try:
            self._socket.send(packet, zmq.NOBLOCK)
            if not self._socket.poll(int(self._seconds * 1000)):
                silence = f"{self._address} gave no answer within {self._seconds:g} s"
                raise PeerError(silence, Reason.NO_ANSWER)
            return messages.unpack(self._socket.recv(zmq.NOBLOCK))
        except zmq.ZMQError as error:
            raise _unreachable(self._address, error.strerror) from error

    def _read(self, packet: Packet) -> Message:
        message = messages.decode(packet.body)
        if isinstance(message, messages.Refused):
            cause = message.cause
            raise RefusedError(f"{self._address} refused: {cause.text}", cause.reason)
        return message


Connect = Callable[[PeerAddress], ControlClient]
"""Opens a session. Raises ``PeerError``."""


def _check_listens(address: PeerAddress, seconds: float) -> None:
    """Raises ``PeerError`` if nobody listens: ZeroMQ itself would keep trying silently."""
    try:
        socket.create_connection((address.host, address.port), timeout=seconds).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or error) from error


def _unreachable(address: PeerAddress, why: object) -> PeerError:
    return PeerError(f"{address} cannot be reached: {why}", Reason.UNREACHABLE)
