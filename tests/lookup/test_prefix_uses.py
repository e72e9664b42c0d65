"""What the workers hear of a new request's prompt."""

from __future__ import annotations

from lmcache_connector.kv_parts.part import Part, Rule, part_key
from lmcache_connector.lookup.chunk_index import ChunkIndex, PrefixUses
from lmcache_connector.plans import CacheEvent, Claim, PrefixUse

KEYS = [bytes([i]) * 32 for i in range(1, 7)]
FULL = Part(Rule.PREFIX, (0,), 16, 0)
WINDOW = Part(Rule.WINDOW, (1,), 16, 32)
PINNED = Claim(b"tenant", pin=True)


def index_of(*keys: bytes) -> ChunkIndex:
    index = ChunkIndex(1)
    index.apply(0, [CacheEvent(key, admitted=True) for key in keys])
    return index


def test_the_last_chunk_held_without_a_gap_stands_for_its_prefix() -> None:
    uses = PrefixUses((FULL,), index_of(*KEYS[:3], KEYS[4]))
    uses.add(KEYS, PINNED)
    assert uses.take() == (PrefixUse(PINNED, (KEYS[2],)),)
    assert uses.take() == ()


def test_nothing_is_told_of_a_prompt_that_nobody_holds() -> None:
    uses = PrefixUses((FULL,), index_of(KEYS[1]))
    uses.add(KEYS, PINNED)
    uses.add([], PINNED)
    assert uses.take() == ()


def test_all_windows_held_are_told() -> None:
    prefix, window = ([part_key(key, part, 2) for key in KEYS] for part in (0, 1))
    uses = PrefixUses((FULL, WINDOW), index_of(*prefix, window[1], window[5]))
    uses.add(KEYS, Claim())
    assert uses.take() == (PrefixUse(Claim(), (prefix[5], window[1], window[5])),)


def test_of_ranks_that_store_in_turn_each_hears_of_its_last_chunk() -> None:
    index = index_of(*KEYS[:4])
    index.share(lambda key: 1, [2])
    uses = PrefixUses((FULL,), index)
    uses.add(KEYS, Claim())
    assert uses.take() == (PrefixUse(Claim(), (KEYS[3], KEYS[2])),)
