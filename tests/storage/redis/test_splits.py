"""Instances of other tensor and pipeline sizes read each other's chunks from a real server.

A value holds 3 of the model's 12 layers. Splits at multiples of 3 share all values; a split inside
a value misses.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

import pytest

from lmcache_connector.kv_layout.topology import RankTopology, all_ranks, ranks_alike
from lmcache_connector.kv_parts.owners import Owners, Share
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from tests.support.redis.chunks import Ends, chunk_key, config
from tests.support.redis.servers import Server

LAYERS, HEADS, TOKENS, WIDTH = 12, 4, 16, 64
LAYER_BYTES = TOKENS * WIDTH
NUM_CHUNKS = 3

Split = tuple[int, tuple[int, ...]]
"""Tensor-parallel size, and layers per pipeline rank."""

ALIGNED: list[Split] = [
    (1, (12,)),
    (2, (12,)),
    (8, (12,)),  # two ranks hold the same head
    (1, (6, 6)),
    (2, (3, 9)),
    (4, (3, 3, 3, 3)),
]
CROOKED: list[Split] = [(1, (5, 7)), (2, (6, 5, 1))]


def whole_chunk(index: int) -> dict[tuple[int, int], bytes]:
    """KV by KV head and layer, the same for every instance of this model."""
    rng = random.Random(index)
    return {(h, layer): rng.randbytes(LAYER_BYTES) for h in range(HEADS) for layer in range(LAYERS)}


def part_of(index: int, rank: RankTopology) -> bytes:
    """One rank's part of the chunk, in its buffer's order."""
    whole = whole_chunk(index)
    layers = range(rank.layer_start, rank.layer_start + rank.num_layers)
    return b"".join(whole[h, layer] for h in rank.shards for layer in layers)


def geometries_of(rank: RankTopology) -> PartGeometries:
    geometry = ChunkGeometry(
        num_tokens=TOKENS,
        layer_start=rank.layer_start,
        layer_widths=(WIDTH,) * rank.num_layers,
        shards=rank.shards,
        num_shards_total=HEADS,
        dtype="bfloat16",
    )
    return PartGeometries((geometry,))


def ranks_of(split: Split) -> tuple[RankTopology, ...]:
    return all_ranks(tp_size=split[0], layer_counts=split[1], num_kv_heads=HEADS)


class Instance:
    """The tiers of all ranks, and the scheduler's look-up."""

    def __init__(self, url: str, split: Split, stack: ExitStack) -> None:
        self.ranks = ranks_of(split)
        # Claims would delay a second writer of the same chunk.
        settings, owners = config(url), Owners((ranks_alike(self.ranks),))
        self.tiers = [
            RedisTier(settings, geometries_of(rank), Share(number, owners).is_owner)
            for number, rank in enumerate(self.ranks)
        ]
        self.lookup = RedisLookup(settings, [geometries_of(rank) for rank in self.ranks])
        for tier in self.tiers:
            stack.callback(tier.close, 2.0)
        stack.callback(self.lookup.close)

    def write(self) -> None:
        ends, expected = Ends(), 0
        for rank, tier in zip(self.ranks, self.tiers, strict=True):
            for index in range(NUM_CHUNKS):
                expected += 1
                tier.put(chunk_key(index), memoryview(part_of(index, rank)), ends, index)
        assert ends.wait(expected) == [True] * expected

    def hits(self) -> int:
        keys = [chunk_key(index) for index in range(NUM_CHUNKS)]
        return self.lookup.exists_prefix(keys, time.monotonic() + 5)

    def read(self, number: int) -> tuple[list[bool], list[bytes]]:
        tier = self.tiers[number]
        buffers = [bytearray(tier.geometries.largest.chunk_bytes) for _ in range(NUM_CHUNKS)]
        result = tier.read(
            [chunk_key(index) for index in range(NUM_CHUNKS)],
            [memoryview(buffer) for buffer in buffers],
            time.monotonic() + 5,
        )
        return result.hits, [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize("reader", ALIGNED, ids=str)
@pytest.mark.parametrize("writer", ALIGNED, ids=str)
def test_aligned_splits_read_each_others_chunks(
    valkey: Server, writer: Split, reader: Split
) -> None:
    with ExitStack() as stack:
        Instance(valkey.url, writer, stack).write()
        instance = Instance(valkey.url, reader, stack)
        assert instance.hits() == NUM_CHUNKS
        for number, rank in enumerate(instance.ranks):
            found, data = instance.read(number)
            assert found == [True] * NUM_CHUNKS
            assert data == [part_of(index, rank) for index in range(NUM_CHUNKS)]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(CROOKED[0], ALIGNED[0]), (ALIGNED[0], CROOKED[0]), (ALIGNED[3], CROOKED[1]), CROOKED],
    ids=str,
)
def test_splits_inside_a_value_miss(valkey: Server, writer: Split, reader: Split) -> None:
    """The look-up finds no chunk. A load that runs all the same misses on the ranks whose values do
    not exist, and is right on the others."""
    with ExitStack() as stack:
        Instance(valkey.url, writer, stack).write()
        instance = Instance(valkey.url, reader, stack)
        assert instance.hits() == 0
        results = [instance.read(number) for number in range(len(instance.ranks))]
        assert not all(found[0] for found, _ in results)
        for rank, (found, data) in zip(instance.ranks, results, strict=True):
            for index in range(NUM_CHUNKS):
                assert not found[index] or data[index] == part_of(index, rank)
        # Both splits' values exist side by side.
        instance.write()
        assert instance.hits() == NUM_CHUNKS
