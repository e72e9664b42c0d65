"""KV transfers of one rank: which chunks are pinned, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing

import pytest

from lmcache_connector.peers.commands import KEY_PREFIX_BYTES, IncompleteTransfer
from lmcache_connector.peers.transfers import Transfers
from lmcache_connector.plans import TransferUpdate
from tests.support.clock import Clock
from tests.support.peers import KEYS, HeldChunks, send_transfer
from tests.support.redis.chunks import PARTS, chunk_data

NUM_HELD = 4
CHUNK_BYTES = PARTS.of(KEYS[0]).chunk_bytes
LEASE_SECONDS = 5.0


@pytest.fixture
def chunks() -> HeldChunks:
    return HeldChunks(range(NUM_HELD))


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def transfers(chunks: HeldChunks, clock: Clock) -> Iterator[Transfers]:
    with closing(Transfers(chunks, 16 * CHUNK_BYTES, LEASE_SECONDS, clock)) as found:
        yield found
    assert chunks.num_leased == 0


def taken(transfers: Transfers) -> frozenset[str]:
    found = transfers.finished()
    transfers.forget_finished(found)
    return found


def names(*indices: int) -> bytes:
    return b"".join(KEYS[i][:KEY_PREFIX_BYTES] for i in indices)


def test_chunks_of_a_transfer_are_sealed_as_they_are_stored(transfers: Transfers) -> None:
    """Only these are, and while the lock that the engine's step takes is not held."""
    sealed = list[bytes]()

    def seal(keys: Iterable[bytes]) -> None:
        assert not transfers._lock.locked()
        sealed.extend(keys)

    transfers.seal = seal
    transfers.store_begins(7)
    send_transfer(transfers, "t", (0, 1), 7)
    transfers.store_ended(7, KEYS[1:4])
    assert sealed == [KEYS[1]]


def test_a_store_ends_though_its_chunks_cannot_be_sealed(transfers: Transfers) -> None:
    """Its request's blocks, and the reader, must not wait forever."""

    def seal(_: Iterable[bytes]) -> None:
        raise MemoryError

    transfers.seal = seal
    transfers.store_begins(7)
    send_transfer(transfers, "t", (0, 1), 7, held="request")
    transfers.store_ended(7, KEYS[:2])
    assert taken(transfers) == {"request"}
    assert transfers.state(b"d", "t") == names(0, 1)


# -- how long chunks are leased ------------------------------------------------------------------


def test_a_transfer_ends_with_its_stores(transfers: Transfers, chunks: HeldChunks) -> None:
    assert transfers.state(b"d", "t") is IncompleteTransfer.UNKNOWN
    transfers.store_begins(7)
    transfers.store_begins(8)
    send_transfer(transfers, "t", (0, 1, 5), 7, 8, held="request")
    assert transfers.state(b"d", "t") is IncompleteTransfer.COMING
    chunks.data[KEYS[5]] = chunk_data(5)
    transfers.store_ended(7, (KEYS[5],))
    assert not transfers.has_updates
    transfers.store_ended(8, ())
    assert transfers.has_updates
    assert taken(transfers) == {"request"}
    assert taken(transfers) == set()
    assert transfers.state(b"d", "t") == names(0, 1, 5)


def test_missing_chunks_are_not_offered(transfers: Transfers) -> None:
    send_transfer(transfers, "t", (3, 4))
    assert transfers.state(b"d", "t") == names(3)


def test_two_readers(transfers: Transfers, chunks: HeldChunks) -> None:
    """Leases last until both are done; a third reader finds the chunks that are left."""
    send_transfer(transfers, "t", (0, 1))
    assert transfers.state(b"one", "t") == transfers.state(b"two", "t") == names(0, 1)
    transfers.done(b"one", "t")
    transfers.done(b"one", "t")
    transfers.done(b"a stranger", "t")
    assert chunks.num_leased == 2
    transfers.done(b"two", "t")
    assert chunks.num_leased == 0
    del chunks.data[KEYS[0]]
    assert transfers.state(b"three", "t") == names(1)


@pytest.mark.parametrize("has_asked", [True, False])
def test_a_transfer_that_nobody_needs_any_more_pins_nothing(
    transfers: Transfers, chunks: HeldChunks, has_asked: bool
) -> None:
    """As when clients go away while their prompts are computed; of several ranks one may not have
    been asked yet."""
    transfers.store_begins(7)
    send_transfer(transfers, "t", (0, 1), 7)
    if has_asked:
        assert transfers.state(b"d", "t") is IncompleteTransfer.COMING
    transfers.done(b"d", "t")
    assert chunks.num_leased == 0
    transfers.store_ended(7, (KEYS[0],))
    assert chunks.num_leased == 0
    assert transfers.state(b"another", "t") == names(0, 1)
    assert chunks.num_leased == 2


def test_a_reader_that_comes_back_finds_what_was_stored_before(
    transfers: Transfers, chunks: HeldChunks
) -> None:
    transfers.store_begins(7)
    send_transfer(transfers, "t", (0, 1, 5), 7)
    transfers.state(b"d", "t")
    transfers.done(b"d", "t")
    assert transfers.state(b"d", "t") is IncompleteTransfer.COMING
    assert chunks.num_leased == 2, "pinned while the rest is coming"
    chunks.data[KEYS[5]] = chunk_data(5)
    transfers.store_ended(7, (KEYS[5],))
    assert chunks.num_leased == 3


def test_a_chunk_stays_for_its_second_transfer(transfers: Transfers, chunks: HeldChunks) -> None:
    send_transfer(transfers, "a", (0,))
    send_transfer(transfers, "b", (0,))
    transfers.state(b"d", "a")
    transfers.done(b"d", "a")
    assert chunks.num_leased == 1


def test_a_lease_expires_unless_a_reader_renews_it(
    transfers: Transfers, chunks: HeldChunks, clock: Clock
) -> None:
    for name in ("asked", "unasked"):
        send_transfer(transfers, name, (0, 1))
    clock.now += 0.9 * LEASE_SECONDS
    transfers.state(b"d", "asked")
    clock.now += 0.9 * LEASE_SECONDS
    transfers.maintain()
    assert chunks.num_leased == 2
    assert transfers.state(b"d", "unasked") is IncompleteTransfer.UNKNOWN
    clock.now += 1.1 * LEASE_SECONDS
    transfers.maintain()
    assert chunks.num_leased == 0


def test_a_share_of_the_tier_bounds_all_transfers(chunks: HeldChunks) -> None:
    with closing(Transfers(chunks, 3 * CHUNK_BYTES, LEASE_SECONDS)) as transfers:
        send_transfer(transfers, "a", (0, 1))
        send_transfer(transfers, "b", (2, 3))
        assert transfers.state(b"d", "b") == transfers.state(b"d", "b") == names(2)
        assert transfers.num_refused == 1, "each chunk counts once, however often it is asked for"
        transfers.state(b"d", "a")
        transfers.done(b"d", "a")
        assert transfers.state(b"d", "b") == names(2, 3)
    assert chunks.num_leased == 0


def test_a_reused_name_is_another_transfer(transfers: Transfers) -> None:
    send_transfer(transfers, "t", (0,))
    transfers.store_begins(3)
    send_transfer(transfers, "t", (1,), 3)
    assert transfers.state(b"d", "t") is IncompleteTransfer.COMING
    transfers.store_ended(3, ())
    assert transfers.state(b"d", "t") == names(1)


def test_requests_finish_whatever_becomes_of_their_transfer(transfers: Transfers) -> None:
    transfers.store_begins(1)
    send_transfer(transfers, "t", (0,), 1, held="first")
    transfers.store_begins(2)
    transfers.apply([TransferUpdate("t", (), frozenset([2]), "second")])
    transfers.apply([TransferUpdate(f"t{i}") for i in range(5000)])
    transfers.store_ended(2, ())
    assert taken(transfers) == {"second"}
    transfers.store_ended(1, ())
    assert taken(transfers) == {"first"}


def test_a_failing_tier_blocks_nothing(transfers: Transfers, chunks: HeldChunks) -> None:
    """Neither the store lane nor vLLM's blocks."""

    def fail(key: bytes) -> None:
        raise RuntimeError("as planted")

    chunks.lease = fail  # type: ignore[method-assign]
    transfers.store_begins(1)
    send_transfer(transfers, "t", (0, 1), 1, held="request")
    transfers.store_ended(1, (KEYS[0],))
    assert taken(transfers) == {"request"}
    assert transfers.state(b"d", "t") == b""


def test_the_readers_kept_are_bounded(transfers: Transfers) -> None:
    send_transfer(transfers, "t", (0,))
    for number in range(1000):
        assert transfers.state(b"%d" % number, "t") == names(0)
    assert transfers.state(b"x" * 100_000, "t") == names(0)
    assert len(transfers._transfers["t"].readers) <= 64


def test_chunks_of_another_rank_are_offered(transfers: Transfers, chunks: HeldChunks) -> None:
    chunks.elsewhere = {KEYS[5]}
    send_transfer(transfers, "t", (0, 4, 5))
    assert transfers.state(b"d", "t") == names(0, 5)
