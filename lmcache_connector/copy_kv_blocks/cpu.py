"""Copies between blocks in host memory: one pass without the GIL per job.

One thread copies. It reaches the speed of one long memcpy, and a second one would take the core
from a thread of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from lmcache_connector.copy_kv_blocks.cpu_memcpy import compile_copy_run
from lmcache_connector.copy_kv_blocks.plan import BlockCopy, Move, check_devices

HOST = torch.device("cpu")
STREAM_MIN_JOB_BYTES = 4 << 20
"""Jobs below this are copied through the caches, where the forward pass soon looks for them.

Measured on an AMD EPYC (family 26) with cold memory: even at 2 MiB, streaming ahead from 4 MiB.
"""


class CpuCopier:
    """Copies on the calling thread. Safe to use from several threads at once.

    Making one compiles the kernel, in one to two seconds. numba must not be loaded earlier than
    that: vLLM's CPU worker does not start once it is.
    """

    shares_cores = True

    def __init__(self, stream_min_job_bytes: int = STREAM_MIN_JOB_BYTES) -> None:
        self._stream_min_job_bytes = stream_min_job_bytes
        self._kernel: Callable[..., None] = _compile()

    def fence(self) -> None:
        """Nothing to wait for: on CPU the forward pass is over when this is called."""

    def copy(
        self,
        copies: Sequence[BlockCopy],
        direction: Literal["h2d", "d2h"],
        after: object = None,
    ) -> int:
        """Copy blocks; returns the bytes moved. Raises CopyError before anything moved."""
        for copy in copies:
            check_devices(copy.src, copy.dst, HOST, HOST)
        plans = [copy.plan() for copy in copies]
        num_bytes = sum(plan.num_bytes for plan in plans)
        for plan in plans:
            rows = (plan.src.anchor, plan.src.index, plan.dst.anchor, plan.dst.index)
            stream = num_bytes >= self._stream_min_job_bytes
            self._kernel(plan.moves, *rows, plan.groups, stream)
        return num_bytes

    def close(self) -> None:
        """Nothing is held."""


def _compile() -> Callable[..., None]:
    """The kernel that runs a whole plan. Addresses are integers; the plan has checked them."""
    import numba  # here, not above: see CpuCopier

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
