"""What arrives is believed only as far as it fits what was agreed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.kv_layout.topology import all_ranks
from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.messages import Accepted, Busy, Card, Offer, Refused, Settled
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.data.frame import Frame
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.memory.host_buffer import HostBuffer
from lmcache_connector.p2p.plans import HandoverLoad
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.incoming import Arrived
from lmcache_connector.p2p.worker.receive_buffer import ReceiveBuffer
from lmcache_connector.p2p.worker.settings import P2PWorkerSettings
from lmcache_connector.storage.geometry import ChunkGeometry

BLOCK, WIDTH, LAYERS, HEADS = 4, 8, 2, 4
BLOCK_BYTES = BLOCK * WIDTH
DIGEST = bytes(range(32))
(OWN,) = all_ranks(tp_size=1, layer_counts=(LAYERS,), num_kv_heads=HEADS)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def peer(rank: int = 0, tp_size: int = 1, name: bytes = b"session") -> Peer:
    card = Card(
        engine_id="e",
        host="h",
        port=1,
        rank=rank,
        model={},
        block_size=BLOCK,
        tp_size=tp_size,
        layer_counts=(LAYERS,),
        num_kv_heads=HEADS,
        is_mla=False,
        transports={},
    )
    return Peer(card, name, b"")


def make(capacity: int = 1 << 20, clock: Callable[[], float] | None = None) -> ReceiveBuffer:
    geometry = ChunkGeometry(BLOCK, 0, (WIDTH,) * LAYERS, OWN.read_shards, HEADS, "uint8")
    own = P2PWorkerSettings(
        config=P2PConfig(lease_seconds=10.0),
        card=peer().card,
        own=OWN,
        block_geometry=geometry,
        layer_widths={},
        num_kv_heads=HEADS,
        max_block_bytes=geometry.chunk_bytes,
        max_blocks=64,
        produces=False,
        consumes=True,
    )
    return ReceiveBuffer(own, HostBuffer(capacity, 0, pinned=False), clock or Clock())


def accepted(buffer: ReceiveBuffer, offer: Offer, who: Peer) -> int:
    answer = buffer.offered(who, offer)
    assert isinstance(answer, Accepted)
    return answer.ticket


OFFER = Offer("t", DIGEST, 3 * BLOCK)


def frame(ticket: int, layer: int = 0, first: int = 0, blocks: int = 3) -> Frame:
    return Frame(ticket, layer, 0, HEADS, first, blocks, blocks * BLOCK_BYTES)


def fill(buffer: ReceiveBuffer, session: bytes, sent: Frame, value: int) -> bool:
    landing = buffer.land(session, sent)
    if landing is None:
        return False
    for view in landing.views:
        view[:] = bytes([value]) * len(view)
    buffer.landed(landing, complete=True)
    return True


def num_blocks(arrived: Arrived) -> int:
    return sum(s.last_block - s.first_block for s in arrived.stretches)


def load(transfer_id: str = "t", digest: bytes = DIGEST) -> HandoverLoad:
    source = PeerAddress("h", 1)
    return HandoverLoad("r", transfer_id, digest, 3 * BLOCK, source, 0, (5, 6, 7), 3.0)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=5, max_size=5), st.integers(0, 200))
def test_a_frame_fits_or_ends_the_connection(numbers: list[int], head_bytes: int) -> None:
    buffer = make()
    ticket = accepted(buffer, OFFER, peer())
    layer, first_head, more_heads, first_block, num_blocks = numbers
    num_heads = more_heads + 1  # a head of a frame without heads is refused before
    sent = Frame(ticket, layer, first_head, num_heads, first_block, num_blocks, head_bytes)
    try:
        landing = buffer.land(b"session", sent)
    except PeerError:
        return
    assert landing is not None
    assert layer < LAYERS
    assert first_head + num_heads <= HEADS
    assert first_block + num_blocks <= 3
    assert all(len(view) == num_blocks * BLOCK_BYTES == head_bytes for view in landing.views)


@pytest.mark.parametrize("last", range(HEADS * LAYERS))
def test_a_block_is_there_once_all_heads_of_all_layers_are(last: int) -> None:
    """Each comes in a frame of its own, and one of them last."""
    buffer = make()
    ticket, waiting = accepted(buffer, OFFER, peer()), buffer.expect(load())
    frames = [
        Frame(ticket, layer, head, 1, 0, 3, 3 * BLOCK_BYTES)
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]
    missing = frames.pop(last)
    for sent in frames:
        assert fill(buffer, b"session", sent, 1)
    assert not buffer.is_over(waiting)
    assert buffer._incoming["t"].usable_end(0) == 0
    assert fill(buffer, b"session", missing, 1)
    assert buffer.is_over(waiting)
    assert buffer._incoming["t"].usable_end(0) == 3


def test_only_who_has_the_ticket_may_send() -> None:
    buffer = make()
    ticket = accepted(buffer, OFFER, peer())
    assert buffer.land(b"another", frame(ticket)) is None
    assert buffer.land(b"session", frame(ticket + 1)) is None
    assert buffer.land(b"session", frame(ticket)) is not None


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({"num_tokens": 0}, Refused),
        ({"num_tokens": 65 * BLOCK}, Refused),
        ({"num_tokens": (1 << 31) - 1}, Refused),
    ],
)
def test_sizes_are_checked_before_memory_is_taken(change: dict[str, int], answer: type) -> None:
    buffer = make()
    assert isinstance(buffer.offered(peer(), msgspec.structs.replace(OFFER, **change)), answer)
    assert buffer._host_buffer.used_bytes == 0


def test_a_full_buffer_is_busy_and_one_that_is_too_small_refuses() -> None:
    whole = 3 * BLOCK_BYTES * HEADS * LAYERS
    tight = make(capacity=4096)
    assert whole < 4096
    accepted(tight, OFFER, peer())
    assert isinstance(tight.offered(peer(), Offer("u", DIGEST, 3 * BLOCK)), Busy)
    assert isinstance(tight.offered(peer(), Offer("v", DIGEST, 63 * BLOCK)), Refused)


def test_one_name_is_one_prompt() -> None:
    buffer = make()
    accepted(buffer, OFFER, peer())
    other = Offer("t", bytes(32), 3 * BLOCK)
    assert isinstance(buffer.offered(peer(1, 2, b"other"), other), Refused)
    waiting = buffer.expect(load(digest=bytes(32)))
    assert waiting.cause is not None
    assert waiting.cause.reason is Reason.OTHER_PROMPT


def test_a_second_offer_begins_its_part_anew() -> None:
    """Ranks 0 and 1 of a producer of two; rank 0's request was preempted."""
    buffer = make()
    first, second = peer(0, 2, b"first"), peer(1, 2, b"second")
    tickets = [accepted(buffer, OFFER, who) for who in (first, second)]

    def half(ticket: int, head: int, layer: int) -> Frame:
        return Frame(ticket, layer, head, 2, 0, 3, 3 * BLOCK_BYTES)

    for layer in range(LAYERS):
        assert fill(buffer, b"second", half(tickets[1], 2, layer), 9)
    assert fill(buffer, b"first", half(tickets[0], 0, 0), 1)
    again = accepted(buffer, OFFER, first)
    assert not fill(buffer, b"first", half(tickets[0], 0, 1), 1)  # the old ticket is void
    waiting = buffer.expect(load())
    assert not buffer.is_over(waiting)
    for layer in range(LAYERS):
        assert not buffer.is_over(waiting)
        assert fill(buffer, b"first", half(again, 0, layer), 2)
    arrived = buffer.next_arrived()
    assert arrived is not None
    assert num_blocks(arrived) == 3
    assert arrived.incoming is not None
    content = bytes(arrived.incoming.memory.region.view)
    half_bytes = len(content) // 2
    assert content == b"\2" * half_bytes + b"\t" * half_bytes


def test_memory_is_kept_while_it_is_written_to() -> None:
    buffer = make()
    ticket = accepted(buffer, OFFER, peer())
    landing = buffer.land(b"session", frame(ticket))
    assert landing is not None
    buffer.discard("t")
    assert buffer._host_buffer.used_bytes > 0
    buffer.landed(landing, complete=True)
    assert buffer._host_buffer.used_bytes == 0
    assert isinstance(buffer.offered(peer(), OFFER), Settled)


def test_a_deadline_uses_what_came_without_a_gap() -> None:
    clock = Clock()
    buffer = make(clock=clock)
    ticket = accepted(buffer, OFFER, peer())
    waiting = buffer.expect(load())
    fill(buffer, b"session", frame(ticket, layer=0), 1)
    fill(buffer, b"session", frame(ticket, layer=1, blocks=2), 1)
    clock.now = 2.9
    buffer.end_overdue()
    assert not buffer.is_over(waiting)
    clock.now = 3.0
    buffer.end_overdue()
    arrived = buffer.next_arrived()
    assert arrived is not None
    late = Cause(Reason.DEADLINE, "it did not come within 3 s")
    assert (num_blocks(arrived), arrived.waiting.cause) == (2, late)
    buffer.loaded(arrived, 2, None)
    assert buffer._host_buffer.used_bytes == 0
    assert buffer.num_waiting == 0


def test_a_lost_connection_ends_what_it_owed_and_nothing_else() -> None:
    buffer = make()
    done, open_ = accepted(buffer, OFFER, peer()), Offer("open", DIGEST, 3 * BLOCK)
    accepted(buffer, open_, peer())
    for layer in range(LAYERS):
        fill(buffer, b"session", frame(done, layer), 1)
    buffer.lost(b"session", Cause(Reason.LOST, "it died"))
    whole = buffer.expect(load())
    assert buffer.is_over(whole)
    assert not buffer.is_over(buffer.expect(load("open")))  # its producer will be asked
