"""Where a hit may end, compared with vLLM's own cache managers."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from lmcache_connector.kv_parts.blocks import BlocksInUse
from lmcache_connector.kv_parts.hit import (
    Hit,
    chunks_to_load,
    find_hit,
    first_token_to_load,
    is_prefix_only,
)
from lmcache_connector.kv_parts.owners import Owners, Share
from lmcache_connector.kv_parts.part import Part, Rule, parents_of_part, part_key


def window(span: int, block_size: int = 4) -> Part:
    return Part(Rule.WINDOW, (1,), block_size, span)


def test_a_hit_is_cut_at_its_ends() -> None:
    assert list(Hit(1, range(2, 6)).up_to(3).ends) == [2, 3]
    assert Hit(1, (2, 5), 7).up_to(4) == Hit(1, (2,), 7)
    assert not Hit(1, range(2, 6)).up_to(0)
    assert not Hit(1, (4,)).up_to(3)
    assert Hit(1, (4,)).up_to(3).stop == 1
    assert Hit(1, (2, 5)).stop == 5


def test_a_load_begins_with_the_first_missing_block() -> None:
    assert chunks_to_load(window(6), 8, 0, 24) == range(2, 3)
    assert first_token_to_load(window(6), 0, 24) == 16
    assert first_token_to_load(window(6), 20, 24) == 20
    assert chunks_to_load(Part(Rule.CHUNKED, (0,), 4, 16), 8, 0, 32) == range(4, 4)
    assert chunks_to_load(Part(Rule.STATE, (0,), 8), 8, 8, 32) == range(3, 4)


# -- vLLM's own managers ---------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> tuple[list[KVCacheSpec], list[Part]]:
    """One to three KV cache groups, and their parts."""
    kinds = draw(st.lists(st.sampled_from("fwwcs"), min_size=1, max_size=3))
    mixed = "c" not in kinds and "s" not in kinds  # otherwise vLLM wants one block size
    specs: list[KVCacheSpec] = []
    parts = []
    for group, kind in enumerate(kinds):
        size = draw(st.sampled_from([4, 8])) if mixed else 4
        common = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
        span = draw(st.integers(2, 40))
        if kind == "f":
            specs.append(FullAttentionSpec(**common))
            parts.append(Part(Rule.PREFIX, (group,), size))
        elif kind == "w":
            specs.append(SlidingWindowSpec(**common, sliding_window=span))
            parts.append(Part(Rule.WINDOW, (group,), size, span))
        elif kind == "c":
            specs.append(ChunkedLocalAttentionSpec(**common, attention_chunk_size=span))
            parts.append(Part(Rule.CHUNKED, (group,), size, span))
        else:
            state = {"shapes": ((4,),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
            specs.append(MambaSpec(block_size=size, **state))
            parts.append(Part(Rule.STATE, (group,), size))
    return specs, parts


class VllmCache:
    """vLLM's coordinator; a test puts blocks into its cache."""

    def __init__(self, specs: list[KVCacheSpec], num_tokens: int) -> None:
        self.block_size = math.lcm(*(spec.block_size for spec in specs))
        self.hash_size = min(spec.block_size for spec in specs)
        groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        self._specs = specs
        self._coordinator: KVCacheCoordinator = get_kv_cache_coordinator(
            KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=4096,
            max_in_flight_tokens=4096,
            use_eagle=False,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=self.block_size,
            hash_block_size=self.hash_size,
        )
        self._hashes = [BlockHash(b"%032d" % i) for i in range(num_tokens // self.hash_size)]

    def put(self, group: int, start: int, end: int) -> None:
        """The full blocks of tokens ``[start, end)``."""
        pool, size = self._coordinator.block_pool, self._specs[group].block_size
        for block in range(-(-start // size), end // size):
            name = self._hashes[(block + 1) * size // self.hash_size - 1]
            key = make_block_hash_with_group_id(name, group)
            if pool.cached_block_hash_to_block.get_one_block(key) is None:
                (new,) = pool.get_new_blocks(1)
                pool.cached_block_hash_to_block.insert(key, new)

    def accepts(self, end: int) -> bool:
        return int(self._coordinator.find_longest_cache_hit(self._hashes, end)[1]) == end


@given(
    model=models(),
    chunk_blocks=st.integers(1, 3),
    local_blocks=st.integers(0, 5),
    seen=st.data(),
    rest=st.integers(0, 9),
)
@settings(max_examples=300)
def test_a_hit_ends_where_vllms_own_hit_could_end(
    model: tuple[list[KVCacheSpec], list[Part]],
    chunk_blocks: int,
    local_blocks: int,
    seen: st.DataObject,
    rest: int,
) -> None:
    """vLLM's cache holds the chunks of the tiers and the blocks of its own hit."""
    specs, parts = model
    num_chunks = 8
    scheduler_block = math.lcm(*(spec.block_size for spec in specs))
    has_state = any(part.rule is Rule.STATE for part in parts)
    size = scheduler_block * (1 if has_state else chunk_blocks)
    num_tokens = num_chunks * size + rest
    local = local_blocks * scheduler_block
    first = local // size
    held = [
        seen.draw(st.lists(st.booleans(), min_size=num_chunks - first, max_size=num_chunks - first))
        for _ in parts
    ]
    cache = VllmCache(specs, num_tokens)
    for group, (part, there) in enumerate(zip(parts, held, strict=True)):
        cache.put(group, part.first_needed(local) // part.block_size * part.block_size, local)
        for chunk, is_there in enumerate(there, first):
            if is_there:
                cache.put(group, chunk * size, (chunk + 1) * size)
    longest = num_tokens if is_prefix_only(parts) else num_tokens - 1
    candidates = range(first + 1, min(num_chunks, longest // size) + 1)
    expected = [end for end in candidates if cache.accepts(end * size)]
    assert list(find_hit(parts, size, local, num_tokens, held).ends) == expected


# -- blocks in use ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_blocks_of_a_finished_request_are_in_use(num_batches: int) -> None:
    """Until the steps under way have ended: one ends with each plan."""
    blocks = BlocksInUse(num_batches, hears_all_frees=True)
    blocks.next_step()
    blocks.freed([[1, 2], [7]])
    for _ in range(num_batches - 1):
        assert blocks.includes_any({2, 3})
        assert blocks.includes_any({7})
        assert not blocks.includes_any({3, 4})
        blocks.next_step()
    assert not blocks.includes_any({1, 2, 7})


def test_after_a_reset_any_block_may_be_in_use() -> None:
    blocks = BlocksInUse(2, hears_all_frees=True)
    blocks.mark_all_in_use()
    assert blocks.includes_any({5})
    blocks.next_step()
    assert not blocks.includes_any({5})


def test_blocks_freed_by_windows_are_in_use() -> None:
    assert BlocksInUse(2, hears_all_frees=False).includes_any({5})
    assert not BlocksInUse(1, hears_all_frees=False).includes_any({5})


# -- owners ----------------------------------------------------------------------------------------


KEYS = [random.Random(i).randbytes(32) for i in range(400)]
# Two stages of four ranks: heads in pairs, latents in fours, and heads on one rank.
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
FOURS = ((0, 1, 2, 3), (4, 5, 6, 7))
OWN = tuple((rank,) for rank in range(8))
OWNERS = Owners((PAIRS, FOURS, OWN))
SHARES = [Share(rank, OWNERS) for rank in range(8)]
BITS = [1 << rank for rank in range(8)]


def test_each_chunk_has_one_owner_in_a_group_and_owners_are_spread() -> None:
    for part, groups in enumerate(OWNERS.alike):
        owned = [0] * 8
        for key in (part_key(key, part, 3) for key in KEYS):
            for group in groups:
                assert {SHARES[rank].owner(key) for rank in group} <= set(group)
                assert sum(SHARES[rank].is_owner(key) for rank in group) == 1
            owned = [n + share.is_owner(key) for n, share in zip(owned, SHARES, strict=True)]
        fair = len(KEYS) / len(groups[0])
        assert all(0.7 * fair < number < 1.3 * fair or number == fair for number in owned)


def test_a_share_names_the_ranks_with_the_same_kv() -> None:
    assert SHARES[1].others == {0, 2, 3}
    assert SHARES[6].others == {4, 5, 7}
    assert Share(3).others == frozenset()
    assert Share(3).is_owner(KEYS[0])


def test_a_rank_stores_unreadable_chunks() -> None:
    reads = [share.others for share in SHARES]
    reads[2] = frozenset({0, 1})  # not from rank 3
    needed = OWNERS.needed(reads)
    for key in KEYS:
        for part in range(3):
            name = part_key(key, part, 3)
            shares = [Share(rank, OWNERS, reads[rank]) for rank in range(8)]
            stored = sum(BITS[share.rank] for share in shares if not share.is_read_from_owner(name))
            assert needed(name) == stored
    everyone = OWNERS.needed([frozenset()] * 8)
    assert {everyone(part_key(key, part, 3)) for key in KEYS for part in range(3)} == {255}


def test_a_chunks_parent_is_the_last_chunk_of_the_same_owner() -> None:
    parents = parents_of_part([Part(Rule.PREFIX, (0,), 16)], 0, KEYS, range(100), KEYS[:100], 4)
    pair = Owners((((0, 1, 2, 3),),))
    for rank in range(4):
        share, before = Share(rank, pair), b""
        for key, parent in zip(KEYS[:100], parents, strict=True):
            if share.is_owner(key):
                assert parent == before
                before = key
