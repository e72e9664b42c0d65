"""Copies between blocks in host memory: one kernel call without the GIL per plan.

One thread copies. It reaches the speed of one long memcpy; a second thread would take a core from
vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from lmcache_connector.copy_kv_blocks.copier import QueuedCopy
from lmcache_connector.copy_kv_blocks.plan import BlockCopy, Move

HOST = torch.device("cpu")
STREAM_MIN_JOB_BYTES = 4 << 20
"""Smaller jobs are copied through the caches, since the forward pass soon reads them there.

Measured on an AMD EPYC (family 26) with cold memory: equal at 2 MiB, streaming faster from 4 MiB.
"""


class CpuCopier:
    """Copies on the calling thread. Thread-safe.

    The first ``CpuCopier`` compiles the kernel, in one to two seconds. numba must not be imported
    before: if it is, vLLM's CPU worker does not start.
    """

    shares_cores = True

    def __init__(self, stream_min_job_bytes: int = STREAM_MIN_JOB_BYTES) -> None:
        self._stream_min_job_bytes = stream_min_job_bytes
        self._kernel: Callable[..., None] = _compile()

    def fence(self) -> None:
        """``None``: on CPU the forward pass has ended when this is called."""

    def copy(
        self, copies: Sequence[BlockCopy], direction: Literal["h2d", "d2h"], after: object = None
    ) -> int:
        """See :meth:`Copier.copy`."""
        plans = [copy.plan(HOST, HOST) for copy in copies]
        num_bytes = sum(plan.num_bytes for plan in plans)
        for plan in plans:
            rows = (plan.src.anchor, plan.src.index, plan.dst.anchor, plan.dst.index)
            stream = num_bytes >= self._stream_min_job_bytes
            self._kernel(plan.moves, *rows, plan.groups, stream)
        return num_bytes

    def enqueue(self, copies: Sequence[BlockCopy]) -> QueuedCopy:
        """Copies at once, as there is no device to queue on."""
        return QueuedCopy(self.copy(copies, "h2d"))

    def close(self) -> None:
        """Nothing to release."""


@functools.cache
def _compile() -> Callable[..., None]:
    """The kernel that runs a whole plan. Addresses are integers that the plan has checked. The
    compiled kernel takes 2 MiB, which are never freed."""
    import numba  # not at import: see CpuCopier

    copy_run, finish = compile_copy_run()

    @numba.njit("void(int64, int64, int64[::1], int64, boolean)", nogil=True)
    def copy_row(dst: Any, src: Any, move: Any, run: Any, stream: Any) -> None:
        for outer in range(move[Move.OUTER_COUNT.value]):
            for inner in range(move[Move.INNER_COUNT.value]):
                copy_run(
                    dst
                    + outer * move[Move.OUTER_DST_STRIDE.value]
                    + inner * move[Move.INNER_DST_STRIDE.value],
                    src
                    + outer * move[Move.OUTER_SRC_STRIDE.value]
                    + inner * move[Move.INNER_SRC_STRIDE.value],
                    run,
                    stream,
                )

    rows = "int64[::1], int64[::1], int64[::1], int64[::1]"

    @numba.njit(f"void(int64[:, ::1], {rows}, int64[::1], boolean)", nogil=True)
    def copy_rows(
        moves: Any,
        src_anchor: Any,
        src_index: Any,
        dst_anchor: Any,
        dst_index: Any,
        groups: Any,
        stream: Any,
    ) -> None:
        for layer in range(moves.shape[0]):
            move = moves[layer]
            for group in range(groups.shape[0] - 1):
                first, last = groups[group], groups[group + 1]
                step = last - first if move[Move.ROWS_JOIN.value] else 1
                for row in range(first, last, step):
                    copy_row(
                        dst_anchor[row]
                        + move[Move.DST_OFFSET.value]
                        + dst_index[row] * move[Move.DST_ROW_STRIDE.value],
                        src_anchor[row]
                        + move[Move.SRC_OFFSET.value]
                        + src_index[row] * move[Move.SRC_ROW_STRIDE.value],
                        move,
                        move[Move.RUN_BYTES.value] * step,
                        stream,
                    )
        finish()

    kernel: Callable[..., None] = copy_rows
    return kernel


LINE_BYTES = 64
STREAM_BYTES = 4 * LINE_BYTES
"""Bytes per group of streaming stores."""


# -- one run of bytes, copied by a kernel that runs without the GIL --------------------------------
#
# Large jobs use streaming stores, as a long memcpy does: an ordinary store first reads the line
# that it overwrites, which costs short runs a third of the memory bandwidth.


@functools.cache
def compile_copy_run() -> tuple[Any, Any]:
    """``copy_run(dst, src, num_bytes, stream)``, and ``finish()`` to call after the last run."""
    import numba  # not at import: see CpuCopier
    from numba import types

    memcpy: Any = types.ExternalFunction(
        "memcpy", types.voidptr(types.intp, types.intp, types.uintp)
    )
    stream_lines, finish = _intrinsics()

    @numba.njit("void(int64, int64, int64, boolean)", nogil=True)
    def copy_run(dst: Any, src: Any, num_bytes: Any, stream: Any) -> None:
        done = 0
        if stream and num_bytes >= 2 * STREAM_BYTES:
            done = -dst % LINE_BYTES  # streaming stores need whole, aligned lines
            memcpy(dst, src, done)
            while done + STREAM_BYTES <= num_bytes:
                stream_lines(dst + done, src + done)
                done += STREAM_BYTES
        if done < num_bytes:
            memcpy(dst + done, src + done, num_bytes - done)

    return copy_run, finish


def _intrinsics() -> tuple[Any, Any]:
    """Operations that numba cannot express, in LLVM IR.

    ``stream_lines(dst, src)`` copies STREAM_BYTES with non-temporal stores; ``dst`` is aligned to
    LINE_BYTES. ``finish()`` orders these stores before any signal that the copy is done.
    """
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    word = ir.IntType(64)
    line = ir.VectorType(ir.IntType(8), LINE_BYTES)
    offsets = [ir.Constant(word, at) for at in range(0, STREAM_BYTES, LINE_BYTES)]

    def emit_lines(_context: Any, builder: Any, _signature: Any, args: Any) -> None:
        dst, src = ([builder.add(base, at) for at in offsets] for base in args)
        pointer = line.as_pointer()
        lines = [builder.load(builder.inttoptr(at, pointer), align=1) for at in src]
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        for at, value in zip(dst, lines, strict=True):
            store = builder.store(value, builder.inttoptr(at, pointer), align=LINE_BYTES)
            store.set_metadata("nontemporal", hint)

    def emit_fence(_context: Any, builder: Any, _signature: Any, _args: Any) -> None:
        builder.fence("seq_cst")

    @intrinsic
    def stream_lines(_typing: Any, dst: Any, src: Any) -> Any:
        return types.void(types.int64, types.int64), emit_lines

    @intrinsic
    def finish(_typing: Any) -> Any:
        return types.void(), emit_fence

    return stream_lines, finish
