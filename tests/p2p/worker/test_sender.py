"""A peer that cannot be used loses its deliveries, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from lmcache_connector.kv_layout.topology import all_ranks
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import Overlap, overlap
from lmcache_connector.p2p.errors import AddressError, PeerError
from lmcache_connector.p2p.memory.host_buffer import HostBuffer
from lmcache_connector.p2p.memory.outgoing import Destination, Outgoing, Piece
from lmcache_connector.p2p.plans import Start
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.ring import Ring
from lmcache_connector.p2p.worker.send_buffer import SendBuffer
from lmcache_connector.p2p.worker.sender import Sender
from lmcache_connector.p2p.worker.session import PeerSession
from lmcache_connector.storage.geometry import ChunkGeometry
from tests.p2p.control.conftest import CARD
from tests.support.redis.server_groups import wait_until

(OWN,) = all_ranks(tp_size=1, layer_counts=CARD.layer_counts, num_kv_heads=CARD.num_kv_heads)


@dataclass
class Peers:
    """Nobody can be reached; whom somebody tried is noted."""

    error: Exception = field(default_factory=lambda: PeerError("nobody is there"))
    tried: list[PeerAddress] = field(default_factory=list)

    def connect(self, address: PeerAddress) -> PeerSession:
        self.tried.append(address)
        raise self.error


@contextmanager
def sending(peers: Peers) -> Iterator[tuple[SendBuffer, Sender]]:
    buffer = SendBuffer(HostBuffer(1 << 20, 0, pinned=False), 60.0, time.monotonic)
    sender = Sender(buffer, OWN, peers.connect, time.monotonic)
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
    outgoing = buffer.open(Start(name, bytes(32), CARD.block_size, None), geometry, Ring(1, 1, 1))
    assert outgoing is not None
    outgoing.num_copying += 1
    buffer.saved(outgoing, Piece(0, 0, 1, ()))
    return outgoing


def wait_until_abandoned(buffer: SendBuffer, outgoing: Outgoing) -> None:
    with buffer.changed:
        assert buffer.changed.wait_for(lambda: not outgoing.deliveries, 5)


def test_a_rank_past_the_last_port_is_refused() -> None:
    """A peer's card says so. Where the next card of the same rank leads, it is tried."""
    peers = Peers()
    bad = msgspec.structs.replace(CARD, port=65535, tp_size=2, rank=1)
    with sending(peers) as (buffer, sender):
        outgoing = save(buffer, "t")
        with pytest.raises(AddressError):
            sender.fetch("t", bad, 0)
        sender.fetch("t", msgspec.structs.replace(bad, port=9), 0)
        wait_until_abandoned(buffer, outgoing)
    assert peers.tried == [PeerAddress(CARD.host, 10)]


@pytest.mark.parametrize("error", [MemoryError(), ValueError("a bug"), OSError("no descriptor")])
def test_no_error_ends_a_courier(error: Exception) -> None:
    peers = Peers(error)
    with sending(peers) as (buffer, sender):
        outgoing = save(buffer, "t")
        for _ in range(3):
            sender.fetch("t", CARD, 0)
            wait_until_abandoned(buffer, outgoing)
        assert len(sender._couriers) == 1
        assert outgoing.pins == 0
    assert len(peers.tried) == 3


class Sessions(Peers):
    """Sessions that break when the first frame is sent."""

    def connect(self, address: PeerAddress) -> PeerSession:
        self.tried.append(address)
        session: Any = SimpleNamespace(
            card=CARD,
            ask=lambda message: messages.Accepted(1, 1, 1),
            send=self._fail,
            close=lambda: None,
        )
        return cast(PeerSession, session)

    def _fail(self, *_: object) -> None:
        raise self.error


def test_a_frame_that_cannot_be_sent_leaves_nothing_pinned() -> None:
    peers = Sessions(MemoryError())
    with sending(peers) as (buffer, sender):
        outgoing = save(buffer, "t")
        for _ in range(2):
            sender.fetch("t", CARD, 0)
            wait_until_abandoned(buffer, outgoing)
            assert outgoing.pins == 0
        buffer.decline("t", Cause(Reason.ABORTED, "enough"))
        assert outgoing.released


@pytest.mark.parametrize("is_sending", [False, True])
def test_nothing_is_sent_from_memory_that_was_given_back(is_sending: bool) -> None:
    """A transfer fails just before its next part is taken. What is under way keeps the memory."""
    buffer = SendBuffer(HostBuffer(1 << 16, 0, pinned=False), 60.0, time.monotonic)
    outgoing = save(buffer, "t")
    first, second = (Destination(PeerAddress(CARD.host, port), "theirs", 0) for port in (1, 2))
    parts = dict.fromkeys((first, second), overlap(OWN, OWN))
    deliveries = buffer.route("t", cast(dict[Destination, Overlap], parts))
    for delivery in deliveries:
        buffer.accepted(delivery, messages.Accepted(1, 1, 1))
    with ExitStack() as sending_it:
        if is_sending:
            assert sending_it.enter_context(buffer.next_part(deliveries[0])) is not None
        buffer.decline("t", Cause(Reason.ABORTED, "enough"))
        assert outgoing.released is not is_sending
    assert outgoing.released
    with buffer.next_part(deliveries[1]) as part:
        assert part is None


class Full(Peers):
    """A consumer without room, which counts what it is asked."""

    num_asked = 0

    def connect(self, address: PeerAddress) -> PeerSession:
        session: Any = SimpleNamespace(card=CARD, ask=self._answer, close=lambda: None)
        return cast(PeerSession, session)

    def _answer(self, message: Message) -> Message:
        self.num_asked += 1
        return messages.Busy()


def test_a_full_consumer_is_asked_seldom_however_many_prompts_wait() -> None:
    peers = Full()
    with sending(peers) as (buffer, sender):
        started = time.monotonic()
        for name in map(str, range(100)):
            save(buffer, name)
            sender.fetch(name, CARD, 0)
        wait_until(lambda: peers.num_asked > 300, "it is not asked again")
        num_asked, seconds = peers.num_asked, time.monotonic() - started
        assert num_asked <= 100 + 250 * seconds


def test_addresses_start_no_more_threads_than_there_may_be() -> None:
    before = threading.active_count()
    release = threading.Event()

    class Slow(Peers):
        def connect(self, address: PeerAddress) -> PeerSession:
            release.wait(10)
            return super().connect(address)

    with sending(Slow()) as (_, sender):
        for port in range(1, 400):
            sender.push(f"t{port}", PeerAddress("127.0.0.1", port))
        assert threading.active_count() <= before + 8
        release.set()
