"""One rank writes each shard of each layer, and every rank that holds it reads it."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.kv_layout.topology import RankTopology, all_ranks, ranks_alike
from lmcache_connector.kv_parts.owners import Owners, Share


@st.composite
def tp_sizes_of(draw: st.DrawFn, num_kv_heads: int) -> int:
    """A size that vLLM can run: it divides the heads, or the heads divide it."""
    divisors = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0]
    multiples = [num_kv_heads * n for n in range(2, 5)]
    return draw(st.sampled_from(divisors + multiples))


@st.composite
def instance_pairs(draw: st.DrawFn) -> tuple[list[RankTopology], list[RankTopology]]:
    """A writing and a reading instance of one model, each with its own parallel sizes."""
    num_kv_heads = draw(st.integers(1, 16))
    num_layers = draw(st.integers(4, 12))
    instances = []
    for _ in range(2):
        tp_size = draw(tp_sizes_of(num_kv_heads))
        cuts = draw(st.sets(st.integers(1, num_layers - 1), max_size=3))
        edges = [0, *sorted(cuts), num_layers]
        counts = tuple(b - a for a, b in pairwise(edges))
        instances.append(
            list(
                all_ranks(
                    tp_size=tp_size,
                    layer_counts=counts,
                    num_kv_heads=num_kv_heads,
                )
            )
        )
    return instances[0], instances[1]


def cells(topology: RankTopology) -> set[tuple[int, int]]:
    return {
        (layer, shard)
        for layer in range(topology.layer_start, topology.layer_start + topology.num_layers)
        for shard in topology.shards
    }


@given(instance_pairs(), st.binary(min_size=32, max_size=32))
def test_owners_of_a_chunk_hold_exactly_once_all_that_is_read(
    pair: tuple[list[RankTopology], list[RankTopology]], key: bytes
) -> None:
    writer, reader = pair
    shares = [Share(rank, Owners((ranks_alike(writer),))) for rank in range(len(writer))]
    owned = [r for r, share in zip(writer, shares, strict=True) if share.is_owner(key)]
    written = Counter(chain.from_iterable(map(cells, owned)))
    assert set(written) == set().union(*map(cells, reader))
    assert set(written.values()) == {1}


@given(instance_pairs())
def test_a_rank_holds_each_head_once(pair: tuple[list[RankTopology], list[RankTopology]]) -> None:
    for instance in pair:
        for rank in instance:
            assert rank.shards == tuple(sorted(set(rank.shards)))


def test_neighbouring_ranks_share_a_head() -> None:
    """As vLLM's ``QKVParallelLinear`` places heads that are fewer than the ranks."""
    ranks = all_ranks(tp_size=8, layer_counts=(4,), num_kv_heads=4)
    assert [rank.shards for rank in ranks] == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    assert ranks_alike(ranks) == ((0, 1), (2, 3), (4, 5), (6, 7))
