"""Copies of planes whose elements lie in another order in a block than in a chunk.

Each plane of a block goes through a small buffer that stays in the CPU's nearest cache: in as runs,
from there to a second one element by element, out as runs. Moving elements takes about as long as
moving the bytes from and to memory; most caches need none of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from lmcache_connector.copy_kv_blocks.cpu_memcpy import compile_copy_run
from lmcache_connector.copy_kv_blocks.plan import CopyPlan, Move
from lmcache_connector.kv_layout.paged_cache import Int64s


def copy_ordered(plan: CopyPlan, order: Int64s, stream: bool) -> None:
    """Run a plan that has an ``order``, in one pass without the GIL.

    Compiles the first time, in less than a second.
    """
    plane_bytes = int(plan.moves[0, Move.RUN_BYTES] * plan.moves[0, Move.INNER_COUNT])
    kernel = _compile(plane_bytes // order.shape[1])
    rows = (plan.src.anchor, plan.src.index, plan.dst.anchor, plan.dst.index)
    kernel(plan.moves, *rows, order, stream)


@functools.cache
def _compile(element_bytes: int) -> Callable[..., None]:
    """The kernel that runs a whole plan. Addresses are integers; the plan has checked them."""
    import numba  # here, not above: see CpuCopier

    copy_run, finish = compile_copy_run()
    copy_element = _element_copy(element_bytes)

    @numba.njit("void(int64, int64, int64[::1], int64[::1], uint8[::1], boolean)", nogil=True)
    def copy_row(dst: Any, src: Any, move: Any, order: Any, buffers: Any, stream: Any) -> None:
        run, num_runs = move[Move.RUN_BYTES.value], move[Move.INNER_COUNT.value]
        taken = buffers.ctypes.data
        placed = taken + run * num_runs
        for _head in range(move[Move.OUTER_COUNT.value]):
            for at in range(num_runs):
                copy_run(taken + at * run, src + at * move[Move.INNER_SRC_STRIDE.value], run, False)
            for at in range(order.shape[0]):
                copy_element(placed + at * element_bytes, taken + order[at] * element_bytes)
            for at in range(num_runs):
                copy_run(
                    dst + at * move[Move.INNER_DST_STRIDE.value], placed + at * run, run, stream
                )
            dst += move[Move.OUTER_DST_STRIDE.value]
            src += move[Move.OUTER_SRC_STRIDE.value]

    rows = "int64[::1], int64[::1], int64[::1], int64[::1]"

    @numba.njit(f"void(int64[:, ::1], {rows}, int64[:, ::1], boolean)", nogil=True)
    def copy_rows(
        moves: Any,
        src_anchor: Any,
        src_index: Any,
        dst_anchor: Any,
        dst_index: Any,
        order: Any,
        stream: Any,
    ) -> None:
        buffers = np.empty(2 * order.shape[1] * element_bytes, np.uint8)
        for layer in range(moves.shape[0]):
            move = moves[layer]
            for row in range(src_index.shape[0]):
                copy_row(
                    dst_anchor[row]
                    + move[Move.DST_OFFSET.value]
                    + dst_index[row] * move[Move.DST_ROW_STRIDE.value],
                    src_anchor[row]
                    + move[Move.SRC_OFFSET.value]
                    + src_index[row] * move[Move.SRC_ROW_STRIDE.value],
                    move,
                    order[layer % order.shape[0]],
                    buffers,
                    stream,
                )
        finish()

    kernel: Callable[..., None] = copy_rows
    return kernel


def _element_copy(num_bytes: int) -> Any:
    """``copy_element(dst, src)``: one load and one store, in LLVM IR."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> None:
        pointer = ir.IntType(8 * num_bytes).as_pointer()
        dst, src = (builder.inttoptr(arg, pointer) for arg in args)
        builder.store(builder.load(src, align=1), dst, align=1)

    @intrinsic
    def copy_element(_typing: Any, dst: Any, src: Any) -> Any:
        return types.void(types.int64, types.int64), emit

    return copy_element
