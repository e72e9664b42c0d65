"""The control plane's client: a session with one peer rank, one question at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.handshake import SessionKey, Transcript, proves
from lmcache_connector.p2p.control.messages import Card, Message, Packet, ProtocolError
from lmcache_connector.p2p.control.peers import Peer, check_peer
from lmcache_connector.p2p.control.sockets import connected_socket
from lmcache_connector.p2p.errors import PeerError, RefusedError
from lmcache_connector.p2p.reasons import Reason


class ElsewhereError(PeerError):
    """The peer is genuine, but its own address is another one than was dialled."""

    def __init__(self, dialled: PeerAddress, address: PeerAddress) -> None:
        super().__init__(f"who answers at {dialled} is at home at {address}", Reason.REFUSED)
        self.address = address


class ControlClient:
    """A session with one peer rank. Connecting raises ``PeerError`` and is bounded by ``seconds``
    per step of the handshake; :class:`ElsewhereError` tells where to dial instead.

    Belongs to the thread that made it.
    """

    def __init__(
        self,
        address: PeerAddress,
        card: Card,
        secret: bytes,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.own_card = card
        self._address = address
        self._seconds = seconds
        self._clock = clock
        self._sequence = 0
        sock = connected_socket(address.host, address.port, seconds)
        self._wire = Wire(sock, clock, seconds)
        try:
            self.peer, self._key = self._introduce(card, secret)
        except PeerError:
            self.close()
            raise

    def ask(self, message: Message) -> Message:
        """Raises :class:`RefusedError` for a refusal, ``PeerError`` for silence or nonsense."""
        self._sequence += 1
        packet = self._exchange(self._key.seal(self._sequence, messages.encode(message)))
        # An answer that came too late is none to the next question.
        if packet.sequence != self._sequence or not self._key.accepts(packet):
            # Only a refusal may come without a tag: a peer that has dropped the session.
            if isinstance(messages.decode(packet.body), messages.Refused):
                raise PeerError(f"{self._address} has ended the session", Reason.LOST)
            raise ProtocolError(f"{self._address} answered with a packet of another session")
        return self._read(packet)

    def close(self) -> None:
        self._wire.close()

    def _introduce(self, card: Card, secret: bytes) -> tuple[Peer, SessionKey]:
        dialled = self._address
        nonce = os.urandom(messages.NONCE_BYTES)
        hello = messages.encode(messages.Hello(nonce, card, dialled.host, dialled.port))
        welcome = self._read(self._exchange(messages.pack(1, hello)))
        if not isinstance(welcome, messages.Welcome):
            raise ProtocolError(f"{dialled} did not answer a hello")
        transcript = Transcript.of(hello, welcome.nonce, messages.encode(welcome.card))
        if not proves(welcome.proof, transcript.server_proof(secret)):
            raise RefusedError(f"{dialled} does not know the shared secret")
        check_peer(card, welcome.card)
        if welcome.card.address != dialled:
            raise ElsewhereError(dialled, welcome.card.address)
        prove = messages.encode(messages.Prove(transcript.client_proof(secret)))
        admitted = self._read(self._exchange(messages.pack(2, prove)))
        if not isinstance(admitted, messages.Admitted):
            raise ProtocolError(f"{dialled} did not finish the handshake")
        self._sequence = 2
        key = SessionKey(transcript.session_key(secret), is_server=False)
        return Peer(welcome.card, admitted.session, key.data_key), key

    def _exchange(self, packet: bytes) -> Packet:
        deadline = Deadline(self._clock() + self._seconds, self._clock)
        try:
            self._wire.send([packet], deadline)
            head = messages.unpack_head(self._receive(messages.HEAD_BYTES, deadline))
            return head.with_body(self._receive(head.num_bytes, deadline))
        except WireError as error:
            if error.fault in (WireFault.DEADLINE, WireFault.STALLED):
                silence = f"{self._address} gave no answer within {self._seconds:g} s"
                raise PeerError(silence, Reason.NO_ANSWER) from error
            raise PeerError(f"{self._address} has ended the session", Reason.LOST) from error

    def _receive(self, num_bytes: int, deadline: Deadline) -> bytes:
        data = bytearray(num_bytes)
        self._wire.receive([memoryview(data)], deadline)
        return bytes(data)

    def _read(self, packet: Packet) -> Message:
        message = messages.decode(packet.body)
        if isinstance(message, messages.Refused):
            cause = message.cause
            raise RefusedError(f"{self._address} refused: {cause.text}", cause.reason)
        return message
