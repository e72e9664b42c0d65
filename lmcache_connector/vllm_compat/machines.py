"""Whether an engine's ranks are on several machines, and how this one is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.utils.network_utils import get_ip

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def machine_host(parallel: ParallelConfig) -> str:
    """This machine's address, as vLLM's own processes know it (``VLLM_HOST_IP``), if the ranks of
    all data-parallel engines may be on several machines; else empty."""
    is_spread = (
        parallel.nnodes > 1
        or parallel.distributed_executor_backend == "ray"
        or parallel.data_parallel_size_local < parallel.data_parallel_size
    )
    return str(get_ip()) if is_spread else ""
