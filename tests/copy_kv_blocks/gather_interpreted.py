"""Run by ``test_cuda_staging.py`` with TRITON_INTERPRET=1, which must be set before Triton loads.

The staged copy with host memory in the part of the device: the same tiles and the same kernel as on
a GPU, with memmove for the bus.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch

from lmcache_connector.copy_kv_blocks.cuda_gather import RowCopyKernel
from lmcache_connector.copy_kv_blocks.cuda_staging import Tile, covers_chunks, stage
from lmcache_connector.copy_kv_blocks.plan import BlockCopy
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.storage.geometry import ChunkGeometry
from tests.support.doubles.copy_reference import (
    LAYOUTS,
    Chunks,
    Paged,
    chunks,
    expected_blocks,
    paged,
    same,
)

NUM_SLOTS = 2


def staged_copy(
    src: Paged | Chunks, dst: Paged | Chunks, ids: list[int], to: list[int], per_slot: int
) -> None:
    """What a pipeline of the CUDA copier does, one tile after the other."""
    left = src.layout if isinstance(src, Paged) else src.buffers
    right = dst.buffers if isinstance(dst, Chunks) else dst.layout
    host = dst.buffers if isinstance(dst, Chunks) else src.buffers  # type: ignore[union-attr]
    run_staged([BlockCopy(left, right, ids, to)], host, per_slot)


def run_staged(copies: Sequence[BlockCopy], host: ChunkBuffers, per_slot: int) -> None:
    plans, to_host = [copy.plan() for copy in copies], isinstance(copies[0].dst, ChunkBuffers)
    slot_bytes = per_slot * host.geometry.chunk_bytes + 5
    memory = torch.zeros(NUM_SLOTS, slot_bytes, dtype=torch.uint8)
    staged = stage(plans, host, to_host, [slot.data_ptr() for slot in memory], slot_bytes)

    def launch(tile: Tile) -> None:
        for plan, rows, (first, last) in zip(plans, staged.rows, tile.rows, strict=True):
            moves = torch.from_numpy(plan.moves)
            if first < last:
                kernel = RowCopyKernel(plan.moves, rows)
                kernel.launch(moves, torch.from_numpy(rows), first, last)

    for tile in staged.tiles:
        if to_host:
            launch(tile)
        for copy in tile.copies:
            ends = (copy.host, copy.staged)
            ctypes.memmove(*(ends if to_host else ends[::-1]), copy.num_bytes)
        if not to_host:
            launch(tile)


@pytest.mark.parametrize("per_slot", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"content": 16, "tokens": 4},
        {"content": 9, "tokens": 3, "heads": 3},
        {"content": 6, "tokens": 4, "heads": 1},
        {"content": 24, "tokens": 8, "kernel_tokens": 4},
        {"content": 2056, "tokens": 1, "layers": 2},
    ],
    ids=str,
)
def test_staged_copies_match_the_reference(
    layout: str, sizes: dict[str, int], per_slot: int
) -> None:
    cache = paged(layout, **sizes)  # type: ignore[arg-type]
    host = chunks(cache, num_chunks=3)
    for src, dst, ids, to in (
        (cache, host, [6, 2, 3, 0, 5, 4], [4, 0, 5, 2, 3, 1]),
        (host, cache, [1, 4, 5], [6, 0, 2]),
    ):
        expected, source = expected_blocks(src, dst, ids, to), src.blocks()
        staged_copy(src, dst, ids, to, per_slot)
        assert same(dst.blocks(), expected)
        assert same(src.blocks(), source)


@pytest.mark.parametrize("per_slot", [1, 2])
def test_groups_cross_the_bus_together(per_slot: int) -> None:
    """Layers 0 and 2 of a part are in one KV cache group, layer 1 in another, with other blocks."""
    caches = [paged("LBHNC", layers=layers, tokens=4, seed=layers) for layers in (2, 1)]
    geometry = ChunkGeometry(8, 0, (24,) * 3, (0, 1), 2, "uint8")
    pool = torch.zeros(3, geometry.chunk_bytes, dtype=torch.uint8)
    addresses, places = [chunk.data_ptr() for chunk in pool], [(0, 2), (1,)]
    views = [ChunkBuffers(geometry, 4, addresses, pool, layers) for layers in places]
    ids = [[6, 2, 3, 0, 5, 4], [1, 2, 0, 6, 4, 3]]
    out = [
        BlockCopy(cache.layout, view, each, range(6))
        for cache, view, each in zip(caches, views, ids, strict=True)
    ]
    plans = [copy.plan() for copy in out]
    assert covers_chunks(plans, views[0])
    assert not covers_chunks(plans[:1], views[0])
    run_staged(out, views[0], per_slot)
    blocks = Chunks(pool, geometry, 4).blocks()
    for cache, each, layers in zip(caches, ids, places, strict=True):
        for layer, source in zip(layers, cache.blocks(), strict=True):
            assert torch.equal(blocks[layer], source[each])
    others = [paged("BLNHC", layers=layers, tokens=4, seed=9) for layers in (2, 1)]
    expected = [cache.blocks() for cache in others]
    for wanted, layers, each in zip(expected, places, ids, strict=True):
        for target, layer in zip(wanted, layers, strict=True):
            target[each[1:]] = blocks[layer][1:]
    back = [
        BlockCopy(view, cache.layout, range(1, 6), each[1:])
        for cache, view, each in zip(others, views, ids, strict=True)
    ]
    run_staged(back, views[0], per_slot)
    assert all(same(cache.blocks(), wanted) for cache, wanted in zip(others, expected, strict=True))
