"""A control server that knows a secret, and clients that ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import ControlClient
from lmcache_connector.p2p.control.messages import Card, Message
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.control.server import ControlServer
from tests.support.redis.servers import free_port

CARD = Card(
    engine_id="engine",
    host="127.0.0.1",
    port=1,
    rank=0,
    model={"weights": "w", "dtype": "bf16"},
    block_size=16,
    tp_size=1,
    layer_counts=(2,),
    num_kv_heads=4,
    is_mla=False,
    transports={"tcp": 2},
)
SECRET = b"sixteen bytes or more"


def card_at(address: PeerAddress) -> Card:
    return msgspec.structs.replace(CARD, host=address.host, port=address.port)


WANT = messages.Want("t", bytes(32), 0)


def answer(peer: Peer, message: Message) -> Message:
    if isinstance(message, messages.Forget):
        raise ValueError("a bug in a handler")
    return (
        messages.Gone(f"other: {peer.card.engine_id} asked") if message == WANT else messages.Done()
    )


@pytest.fixture(scope="module")
def server() -> Iterator[PeerAddress]:
    address = PeerAddress("127.0.0.1", free_port())
    server = ControlServer(address.host, address.port, card_at(address), SECRET, answer)
    yield address
    server.close(5)


Connect = Callable[..., ControlClient]


@pytest.fixture
def connect(server: PeerAddress) -> Iterator[Connect]:
    clients = []

    def make(card: Card = CARD, secret: bytes = SECRET, seconds: float = 2.0) -> ControlClient:
        client = ControlClient(server, card, secret, seconds)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
