"""A peer that cannot be used loses its deliveries, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from lmcache_connector.kv_layout.topology import all_ranks
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import ControlClient
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.plans import Start
from lmcache_connector.p2p.worker.host_buffer import HostBuffer
from lmcache_connector.p2p.worker.send_buffer import SendBuffer
from lmcache_connector.p2p.worker.sender import Sender
from lmcache_connector.p2p.worker.transfer import Outgoing, Piece
from lmcache_connector.storage.geometry import ChunkGeometry
from tests.p2p.control.conftest import CARD

(OWN,) = all_ranks(tp_size=1, layer_counts=CARD.layer_counts, num_kv_heads=CARD.num_kv_heads)


class Peers:
    """Nobody can be reached; whom somebody tried is noted."""

    def __init__(self) -> None:
        self.tried: list[PeerAddress] = []

    def connect(self, address: PeerAddress) -> ControlClient:
        self.tried.append(address)
        raise PeerError("nobody is there")


@contextmanager
def sending(peers: Peers) -> Iterator[tuple[SendBuffer, Sender]]:
    buffer = SendBuffer(HostBuffer(1 << 16, 0, pinned=False), 60.0, time.monotonic)
    sender = Sender(buffer, OWN, peers.connect, {}, 1.0, time.monotonic)
    try:
        yield buffer, sender
    finally:
        buffer.close()
        sender.close(5)


def save(buffer: SendBuffer, name: str) -> Outgoing:
    shards = OWN.read_shards
    geometry = ChunkGeometry(
        CARD.block_size, 0, (8,) * OWN.num_layers, shards, len(shards), "uint8"
    )
    outgoing = buffer.open(Start(name, bytes(32), CARD.block_size, None), geometry, 1)
    assert outgoing is not None
    buffer.save_planned(outgoing)
    buffer.saved(outgoing, Piece(0, 0, 1, ()))
    return outgoing


def wait_until_abandoned(buffer: SendBuffer, outgoing: Outgoing) -> None:
    with buffer.changed:
        assert buffer.changed.wait_for(lambda: not outgoing.deliveries, 5)


def test_a_rank_past_the_last_port_ends_no_thread() -> None:
    """A peer's card says so. Where the next card of the same rank leads, it is tried."""
    peers = Peers()
    bad = msgspec.structs.replace(CARD, port=65535, tp_size=2, rank=1)
    with sending(peers) as (buffer, sender):
        outgoing = save(buffer, "t")
        for card in (bad, msgspec.structs.replace(bad, port=9), bad):
            sender.fetch("t", card, 0)
            wait_until_abandoned(buffer, outgoing)
    assert peers.tried == [PeerAddress(CARD.host, 10)]
