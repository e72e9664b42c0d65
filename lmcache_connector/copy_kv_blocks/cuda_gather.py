"""The gather and scatter kernel: runs a copy plan on the device.

One program copies some runs of one row of one layer. Under ``TRITON_INTERPRET=1`` the kernel runs
on host memory, for tests without a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from lmcache_connector.copy_kv_blocks.plan import Move
from lmcache_connector.kv_layout.paged_cache import Int64s

ELEMENTS_PER_PROGRAM = 1024
"""Words per program and iteration: 8 KiB of 8-byte words, enough loads in flight."""
_COUNTS = {Move.OUTER_COUNT, Move.INNER_COUNT, Move.ROWS_JOIN}
_ADDRESSES = [field for field in Move if field not in _COUNTS]

# Kernels can read only constexpr globals.
NUM_FIELDS = tl.constexpr(len(Move))
SRC_OFFSET = tl.constexpr(int(Move.SRC_OFFSET))
DST_OFFSET = tl.constexpr(int(Move.DST_OFFSET))
SRC_ROW_STRIDE = tl.constexpr(int(Move.SRC_ROW_STRIDE))
DST_ROW_STRIDE = tl.constexpr(int(Move.DST_ROW_STRIDE))
OUTER_COUNT = tl.constexpr(int(Move.OUTER_COUNT))
OUTER_SRC_STRIDE = tl.constexpr(int(Move.OUTER_SRC_STRIDE))
OUTER_DST_STRIDE = tl.constexpr(int(Move.OUTER_DST_STRIDE))
INNER_COUNT = tl.constexpr(int(Move.INNER_COUNT))
INNER_SRC_STRIDE = tl.constexpr(int(Move.INNER_SRC_STRIDE))
INNER_DST_STRIDE = tl.constexpr(int(Move.INNER_DST_STRIDE))
RUN_BYTES = tl.constexpr(int(Move.RUN_BYTES))


# Not specialised: else a count of 1 or a multiple of 16 would compile a kernel during a copy.
@triton.jit(do_not_specialize=["num_rows", "first_row"])
def _copy_rows(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    moves,
    rows,
    num_rows,
    first_row,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    RUNS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = rows + first_row + tl.program_id(0)
    move = moves + tl.program_id(1) * NUM_FIELDS
    src = (
        tl.load(row)
        + tl.load(move + SRC_OFFSET)
        + tl.load(row + num_rows) * tl.load(move + SRC_ROW_STRIDE)
    )
    dst = tl.load(row + 2 * num_rows) + tl.load(move + DST_OFFSET)
    dst += tl.load(row + 3 * num_rows) * tl.load(move + DST_ROW_STRIDE)
    inner_count = tl.load(move + INNER_COUNT)
    num_runs = tl.load(move + OUTER_COUNT) * inner_count
    num_words = tl.load(move + RUN_BYTES) // WORD_BYTES
    run = (tl.program_id(2) * RUNS + tl.arange(0, RUNS)).to(tl.int64)
    outer = run // inner_count
    inner = run % inner_count
    src_runs = (
        src + outer * tl.load(move + OUTER_SRC_STRIDE) + inner * tl.load(move + INNER_SRC_STRIDE)
    )
    dst_runs = (
        dst + outer * tl.load(move + OUTER_DST_STRIDE) + inner * tl.load(move + INNER_DST_STRIDE)
    )
    src_words = src_runs.to(tl.pointer_type(WORD))[:, None]
    dst_words = dst_runs.to(tl.pointer_type(WORD))[:, None]
    for first in range(0, num_words, WORDS):
        word = first + tl.arange(0, WORDS)[None, :]
        mask = (run < num_runs)[:, None] & (word < num_words)
        tl.store(dst_words + word, tl.load(src_words + word, mask=mask), mask=mask)


class RowCopyKernel:
    """The kernel, with word size and grid for one plan."""

    def __init__(self, moves: Int64s, rows: Int64s) -> None:
        """``moves`` as in CopyPlan, ``rows`` as in StagedCopy; both on the host."""
        word_bytes = _word_bytes(moves, rows)
        longest = triton.next_power_of_2(max(1, int(moves[:, Move.RUN_BYTES].max()) // word_bytes))
        words = min(longest, ELEMENTS_PER_PROGRAM)
        runs = ELEMENTS_PER_PROGRAM // words
        self._num_rows = rows.shape[1]
        self._grid = (
            len(moves),
            triton.cdiv(int((moves[:, Move.OUTER_COUNT] * moves[:, Move.INNER_COUNT]).max()), runs),
        )
        self._constants: dict[str, Any] = {
            "WORD": {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[word_bytes],
            "WORD_BYTES": word_bytes,
            "RUNS": runs,
            "WORDS": words,
        }

    def launch(
        self, moves: torch.Tensor, rows: torch.Tensor, first_row: int, last_row: int
    ) -> None:
        """Copy rows ``[first_row, last_row)`` on the current stream, with tables on the device."""
        grid = (last_row - first_row, *self._grid)
        _copy_rows[grid](moves, rows, self._num_rows, first_row, **self._constants)


def _word_bytes(moves: Int64s, rows: Int64s) -> int:
    """The widest word that divides every address and run."""
    common = int(np.gcd.reduce(moves[:, _ADDRESSES], axis=None))
    common = int(np.gcd.reduce(rows[[0, 2]], axis=None, initial=common))
    return min(8, common & -common)
