"""Where an engine's ranks are among those of all data-parallel engines and machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.utils.network_utils import get_ip

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def machine_host(parallel: ParallelConfig, engine_id: str) -> str:
    """This machine's address, as vLLM's own processes know it (``VLLM_HOST_IP``), if the ranks of
    all data-parallel engines may be on several machines; else empty."""
    is_spread = (
        parallel.nnodes > 1
        or parallel.distributed_executor_backend == "ray"
        or _is_one_of_many(parallel, engine_id)
    )
    return str(get_ip()) if is_spread else ""


def engine_index(parallel: ParallelConfig) -> int:
    """Of this engine among its data-parallel siblings. ``data_parallel_rank`` is 0 in all of them
    unless the model has experts."""
    return int(parallel.data_parallel_index)


def engine_header(parallel: ParallelConfig, engine_id: str) -> int:
    """What ``X-data-parallel-rank`` leads a request of the common API to this engine; -1 if the API
    is this engine's alone, or takes no such header."""
    has_header = _is_one_of_many(parallel, engine_id) and not parallel.local_engines_only
    return engine_index(parallel) if has_header else -1


def _is_one_of_many(parallel: ParallelConfig, engine_id: str) -> bool:
    """vLLM tells the engines of a model without experts that each is alone, but names them."""
    named = engine_id.endswith(f"_dp{parallel.data_parallel_index}")
    return named or parallel.data_parallel_size > 1
