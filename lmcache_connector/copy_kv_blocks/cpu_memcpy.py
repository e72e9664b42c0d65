"""One run of bytes, copied by a kernel that runs without the GIL.

Large jobs are written with streaming stores, as a long memcpy is: an ordinary store first reads
the line it overwrites, which costs short runs a third of the memory bandwidth.
"""

from __future__ import annotations

import functools
from typing import Any

LINE_BYTES = 64
STREAM_BYTES = 4 * LINE_BYTES
"""Streaming stores are issued for this many bytes at a time."""


@functools.cache
def compile_copy_run() -> tuple[Any, Any]:
    """``copy_run(dst, src, num_bytes, stream)``, and ``finish()`` to call after the last run."""
    import numba  # here, not above: see CpuCopier
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
    """Two pieces of LLVM IR that numba cannot express.

    ``stream_lines(dst, src)`` copies STREAM_BYTES with non-temporal stores; ``dst`` is aligned to
    LINE_BYTES. ``finish()`` orders them before whatever tells other threads of the copy.
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
