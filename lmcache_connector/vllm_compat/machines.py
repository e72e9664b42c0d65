"""Where an engine's ranks are among those of all data-parallel engines and machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def engine_index(parallel: ParallelConfig) -> int:
    """Of this engine among its data-parallel siblings. ``data_parallel_rank`` is 0 in all of them
    unless the model has experts."""
    return int(parallel.data_parallel_index)


def engine_header(parallel: ParallelConfig, engine_id: str) -> int:
    """What ``X-data-parallel-rank`` leads a request of the common API to this engine; -1 if the API
    is this engine's alone, or takes no such header."""
    # vLLM tells the engines of a model without experts that each is alone, but names them.
    is_named = engine_id.endswith(f"_dp{parallel.data_parallel_index}")
    is_one_of_many = is_named or parallel.data_parallel_size > 1
    has_header = is_one_of_many and not parallel.local_engines_only
    return engine_index(parallel) if has_header else -1
