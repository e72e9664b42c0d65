"""The index of chunks, and the uses of prompts that are sent to workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.kv_parts.part import Part, Rule, part_key
from lmcache_connector.lookup.chunk_index import ChunkIndex, PrefixUses
from lmcache_connector.plans import CacheEvent, Claim, PrefixUse

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
        assert len(index._holders) == len({key for _, key in holders})
        assert len(index._planned) == len(planned)


def shared_by_two() -> ChunkIndex:
    """Two ranks that read each other's chunks: rank 0 owns A, rank 1 owns B."""
    index = ChunkIndex(2)
    index.needed = {A: 1, B: 2, KEYS[2]: 3}.__getitem__
    return index


def test_a_chunk_is_a_hit_once_its_owners_have_it() -> None:
    index = shared_by_two()
    index.apply(0, [CacheEvent(A, True), CacheEvent(KEYS[2], True)])
    assert index.has_each([A, B, KEYS[2]]) == [True, False, False]
    index.apply(1, [CacheEvent(B, True), CacheEvent(KEYS[2], True)])
    assert index.has_each([A, B, KEYS[2]]) == [True, True, True]
    assert [index.num_firm([key]) for key in (A, B, KEYS[2])] == [0, 0, 1]


def test_a_chunk_that_a_rank_cannot_read_is_no_hit() -> None:
    index = shared_by_two()
    index.apply(0, [CacheEvent(A, True)])
    index.apply(1, [CacheEvent(A, False)])
    assert A not in index
    assert len(index._holders) == 0
    index.apply(0, [CacheEvent(A, True)])  # its owner has it, and reports it at the next store
    assert A in index


def test_the_owners_chunk_stays_when_a_copy_is_evicted() -> None:
    """A rank stored the copy while it could not read the owner's chunk."""
    index = shared_by_two()
    index.apply(0, [CacheEvent(A, True)])
    index.apply(1, [CacheEvent(A, True), CacheEvent(A, False)])
    assert A in index
    index.apply(1, [CacheEvent(A, False)])
    assert A not in index


def test_the_first_chunk_that_a_rank_stores_for_others_is_found() -> None:
    index = shared_by_two()
    index.plan([A, KEYS[2]], job_id=1)
    assert index.has_each([A, KEYS[2]]) == [True, True]
    assert index.first_stored_elsewhere([B, A]) == 1
    assert index.first_stored_elsewhere([KEYS[2]]) == 1
    index.apply(0, [CacheEvent(A, True)])
    assert index.first_stored_elsewhere([A]) == 1


# -- prompts sent to workers -----------------------------------------------------------------------


PROMPT = [bytes([i]) * 32 for i in range(1, 7)]
FULL = Part(Rule.PREFIX, (0,), 16, 0)
WINDOW = Part(Rule.WINDOW, (1,), 16, 32)
PINNED = Claim(b"tenant", pin=True)


def index_of(*keys: bytes) -> ChunkIndex:
    index = ChunkIndex(1)
    index.apply(0, [CacheEvent(key, admitted=True) for key in keys])
    return index


def test_a_prompt_is_named_by_its_last_chunk_before_a_gap() -> None:
    uses = PrefixUses((FULL,), index_of(*PROMPT[:3], PROMPT[4]), stores=True)
    uses.add(PROMPT, PINNED)
    assert uses.take() == (PrefixUse(PINNED, (PROMPT[2],), may_write=True),)
    assert uses.take() == ()


def test_prompts_without_a_chunk_are_not_sent() -> None:
    uses = PrefixUses((FULL,), index_of(PROMPT[1]), stores=False)
    uses.add(PROMPT, PINNED)
    uses.add([], PINNED)
    assert uses.take() == ()


def test_all_windows_are_sent() -> None:
    prefix, window = ([part_key(key, part, 2) for key in PROMPT] for part in (0, 1))
    uses = PrefixUses((FULL, WINDOW), index_of(*prefix, window[1], window[5]), stores=False)
    uses.add(PROMPT, Claim())
    assert uses.take() == (PrefixUse(Claim(), (prefix[5], window[1], window[5])),)


def test_each_of_the_owners_is_told_of_its_last_chunk() -> None:
    index = index_of(*PROMPT[:4])
    index.share(lambda key: 1, [2])
    uses = PrefixUses((FULL,), index, stores=False)
    uses.add(PROMPT, Claim())
    assert uses.take() == (PrefixUse(Claim(), (PROMPT[3], PROMPT[2])),)
