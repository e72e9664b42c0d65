"""Run by ``test_cuda_staging.py`` with TRITON_INTERPRET=1, which must be set before Triton loads.

The staged copy with host memory in the part of the device: the same tiles and the same kernel as on
a GPU, with memmove for the bus.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from lmcache_connector.copy_kv_blocks.cuda_gather import RowCopyKernel
from lmcache_connector.copy_kv_blocks.cuda_staging import stage
from lmcache_connector.copy_kv_blocks.plan import plan_copy
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
    to_host = isinstance(dst, Chunks)
    left = src.layout if isinstance(src, Paged) else src.buffers
    right = dst.buffers if isinstance(dst, Chunks) else dst.layout
    host = dst.buffers if isinstance(dst, Chunks) else src.buffers  # type: ignore[union-attr]
    plan = plan_copy(left, right, ids, to)
    slot_bytes = per_slot * host.geometry.chunk_bytes + 5
    memory = torch.zeros(NUM_SLOTS, slot_bytes, dtype=torch.uint8)
    staged = stage([plan], host, to_host, [slot.data_ptr() for slot in memory], slot_bytes)
    kernel = RowCopyKernel(plan.moves, staged.rows[0])
    moves, rows = torch.from_numpy(plan.moves), torch.from_numpy(staged.rows[0])
    for tile in staged.tiles:
        if to_host:
            kernel.launch(moves, rows, *tile.rows[0])
        for copy in tile.copies:
            ends = (copy.host, copy.staged)
            ctypes.memmove(*(ends if to_host else ends[::-1]), copy.num_bytes)
        if not to_host:
            kernel.launch(moves, rows, *tile.rows[0])


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
