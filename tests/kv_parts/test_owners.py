"""Who of those that hold the same stores which chunk."""

from __future__ import annotations

import random

from lmcache_connector.kv_parts.owners import Owners, Share
from lmcache_connector.kv_parts.part import Part, Rule, parents_of_part, part_key

KEYS = [random.Random(i).randbytes(32) for i in range(400)]
# Two stages of four ranks each: a head in pairs, latents in fours, and heads of their own.
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
FOURS = ((0, 1, 2, 3), (4, 5, 6, 7))
OWN = tuple((rank,) for rank in range(8))
OWNERS = Owners((PAIRS, FOURS, OWN))
SHARES = [Share(rank, OWNERS) for rank in range(8)]
BITS = [1 << rank for rank in range(8)]


def test_each_group_has_one_owner_of_a_chunk_and_all_take_turns() -> None:
    for part, groups in enumerate(OWNERS.alike):
        owned = [0] * 8
        for key in (part_key(key, part, 3) for key in KEYS):
            for group in groups:
                assert {SHARES[rank].owner(key) for rank in group} <= set(group)
                assert sum(SHARES[rank].is_owner(key) for rank in group) == 1
            owned = [n + share.is_owner(key) for n, share in zip(owned, SHARES, strict=True)]
        fair = len(KEYS) / len(groups[0])
        assert all(0.7 * fair < number < 1.3 * fair or number == fair for number in owned)


def test_whom_a_rank_shares_with() -> None:
    assert SHARES[1].others == {0, 2, 3}
    assert SHARES[6].others == {4, 5, 7}
    assert Share(3).others == frozenset()
    assert Share(3).is_owner(KEYS[0])


def test_a_rank_stores_what_it_cannot_read() -> None:
    reads = [share.others for share in SHARES]
    reads[2] = frozenset({0, 1})  # and not from rank 3
    needed = OWNERS.needed(reads)
    for key in KEYS:
        for part in range(3):
            name = part_key(key, part, 3)
            shares = [Share(rank, OWNERS, reads[rank]) for rank in range(8)]
            stored = sum(BITS[share.rank] for share in shares if not share.is_elsewhere(name))
            assert needed(name) == stored
    everyone = OWNERS.needed([frozenset()] * 8)
    assert {everyone(part_key(key, part, 3)) for key in KEYS for part in range(3)} == {255}


def test_a_chunk_builds_on_the_one_before_it_that_has_the_same_owner() -> None:
    parents = parents_of_part([Part(Rule.PREFIX, (0,), 16)], 0, KEYS, range(100), KEYS[:100], 4)
    pair = Owners((((0, 1, 2, 3),),))
    for rank in range(4):
        share, before = Share(rank, pair), b""
        for key, parent in zip(KEYS, parents, strict=False):
            if share.is_owner(key):
                assert parent == before
                before = key
