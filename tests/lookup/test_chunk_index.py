"""The index against a plain model of it, over random events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.plans import CacheEvent

KEYS = [bytes([i]) * 32 for i in range(4)]
A, B = KEYS[:2]

acts = st.lists(
    st.tuples(
        st.sampled_from(["admit", "evict", "drop", "plan", "settle"]),
        st.integers(0, 2),  # rank, or which job
        st.sampled_from(KEYS),
    ),
    max_size=60,
)


def test_a_chunk_is_there_when_every_rank_has_it() -> None:
    index = ChunkIndex(2)
    index.apply(0, [CacheEvent(A, True)])
    assert A not in index
    index.apply(1, [CacheEvent(A, True)])
    assert A in index
    index.apply(0, [CacheEvent(A, False)])
    assert A not in index
    assert len(index) == 1
    index.drop(1, A)
    assert len(index) == 0


def test_a_planned_chunk_is_a_hit_that_waits_for_its_store() -> None:
    index = ChunkIndex(1)
    index.plan([A, B], job_id=3)
    assert A in index
    assert index.planned_job(A) == 3
    index.apply(0, [CacheEvent(A, True)])
    assert index.planned_job(A) == 0
    index.settle([A, B], job_id=3)
    assert A in index
    assert B not in index
    assert index.num_planned == 0


def test_an_earlier_store_that_ends_does_not_settle_a_later_one() -> None:
    index = ChunkIndex(1)
    index.plan([A], job_id=1)
    index.plan([A], job_id=2)
    index.settle([A], job_id=1)
    assert index.planned_job(A) == 2


@given(acts)
def test_the_index_agrees_with_plain_sets(events: list[tuple[str, int, bytes]]) -> None:
    index = ChunkIndex(3)
    holders: set[tuple[int, bytes]] = set()
    planned: dict[bytes, int] = {}
    for act, number, key in events:
        match act:
            case "admit":
                index.apply(number, [CacheEvent(key, True)])
                holders.add((number, key))
            case "evict":
                index.apply(number, [CacheEvent(key, False)])
                holders.discard((number, key))
            case "drop":
                index.drop(number, key)
                holders.discard((number, key))
            case "plan":
                index.plan([key], number + 1)
                planned[key] = number + 1
            case "settle":
                index.settle([key], number + 1)
                if planned.get(key) == number + 1:
                    del planned[key]
        for one in KEYS:
            everywhere = all((rank, one) in holders for rank in range(3))
            assert (one in index) == (everywhere or one in planned)
            assert index.planned_job(one) == (0 if everywhere else planned.get(one, 0))
        assert len(index) == len({key for _, key in holders})
        assert index.num_planned == len(planned)


def shared_by_two() -> ChunkIndex:
    """Of two ranks, each reads what the other owns: rank 0 that of A, rank 1 that of B."""
    index = ChunkIndex(2)
    index.needed = {A: 1, B: 2, KEYS[2]: 3}.__getitem__
    return index


def test_a_chunk_is_there_when_those_that_must_have_it() -> None:
    index = shared_by_two()
    index.apply(0, [CacheEvent(A, True), CacheEvent(KEYS[2], True)])
    assert index.has_each([A, B, KEYS[2]]) == [True, False, False]
    index.apply(1, [CacheEvent(B, True), CacheEvent(KEYS[2], True)])
    assert index.has_each([A, B, KEYS[2]]) == [True, True, True]
    assert [index.num_firm([key]) for key in (A, B, KEYS[2])] == [0, 0, 1]


def test_what_a_rank_could_not_read_is_as_good_as_gone() -> None:
    index = shared_by_two()
    index.apply(0, [CacheEvent(A, True)])
    index.apply(1, [CacheEvent(A, False)])
    assert A not in index
    assert len(index) == 0
    index.apply(0, [CacheEvent(A, True)])  # its owner has found it when it was to store it again
    assert A in index


def test_a_copy_beside_the_owners_goes_and_the_chunk_stays() -> None:
    """Of a rank that has stored it while it could not read its owner."""
    index = shared_by_two()
    index.apply(0, [CacheEvent(A, True)])
    index.apply(1, [CacheEvent(A, True), CacheEvent(A, False)])
    assert A in index
    index.apply(1, [CacheEvent(A, False)])
    assert A not in index


def test_stores_of_other_ranks_are_waited_for() -> None:
    index = shared_by_two()
    index.plan([A, KEYS[2]], job_id=1)
    assert index.has_each([A, KEYS[2]]) == [True, True]
    assert index.first_stored_elsewhere([B, A]) == 1
    assert index.first_stored_elsewhere([KEYS[2]]) == 1
    index.apply(0, [CacheEvent(A, True)])
    assert index.first_stored_elsewhere([A]) == 1
