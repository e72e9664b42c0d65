"""An authenticated peer rank: its card, its address, and both planes to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import ControlClient, ElsewhereError
from lmcache_connector.p2p.control.messages import Card, Message
from lmcache_connector.p2p.data.base import Outlet, Session, Transport
from lmcache_connector.p2p.data.frame import Frame
from lmcache_connector.p2p.errors import PeerError, RefusedError


class PeerSession:
    """Belongs to the thread that made it. ``seconds``: how long a data connection may take."""

    def __init__(
        self, client: ControlClient, transports: Mapping[str, Transport], seconds: float
    ) -> None:
        self._client = client
        self._transports = transports
        self._seconds = seconds
        self._outlet: Outlet | None = None

    @property
    def card(self) -> Card:
        return self._client.peer.card

    @property
    def has_link(self) -> bool:
        """Whether one of the two can read the other's memory."""
        return not set(self._client.own_card.links).isdisjoint(self.card.links)

    def ask(self, message: Message) -> Message:
        """Raises ``RefusedError`` for a refusal, ``PeerError`` for silence or nonsense."""
        return self._client.ask(message)

    def send(self, frame: Frame, views: Sequence[memoryview]) -> None:
        """Raises ``PeerError``; then the session is of no more use."""
        if self._outlet is None:
            self._outlet = self._open()
        self._outlet.send(frame, views)

    def close(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
        self._client.close()

    def _open(self) -> Outlet:
        """Where the peer's own card says: nobody else has a say in it."""
        card, peer = self.card, self._client.peer
        names = [name for name in self._transports if name != "nixl" or self.has_link]
        name = next((name for name in names if name in card.transports), None)
        if name is None:
            raise PeerError(f"{card.address} shares no transport with this instance")
        session = Session(peer.session, peer.data_key)
        port = card.transports[name]
        return self._transports[name].connect(card.address.host, port, session, self._seconds)


class Dialer:
    """Opens sessions. ``card``: how this rank introduces itself. ``may_talk_to``: no other host is
    dialled, whoever named it. ``seconds``: how long a peer may take to answer."""

    def __init__(
        self,
        card: Card,
        secret: bytes,
        may_talk_to: Callable[[PeerAddress], bool],
        transports: Mapping[str, Transport],
        seconds: float,
    ) -> None:
        self.card = card
        self._secret = secret
        self._may_talk_to = may_talk_to
        self._transports = transports
        self._seconds = seconds

    def __call__(self, address: PeerAddress) -> PeerSession:
        """Raises ``PeerError``. A peer that was named by another address than its own is dialled
        once more, at its own."""
        try:
            client = self._dial(address)
        except ElsewhereError as elsewhere:
            client = self._dial(elsewhere.address)
        return PeerSession(client, self._transports, self._seconds)

    def _dial(self, address: PeerAddress) -> ControlClient:
        if not self._may_talk_to(address):
            raise RefusedError(f"{address} is not among the peers this instance may talk to")
        return ControlClient(address, self.card, self._secret, self._seconds)


Connect = Callable[[PeerAddress], PeerSession]
"""Opens a session. Raises ``PeerError``."""
