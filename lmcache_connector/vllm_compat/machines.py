"""The index of an engine among data-parallel engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def engine_index(parallel: ParallelConfig) -> int:
    """``data_parallel_index``, since ``data_parallel_rank`` is 0 in all engines of a model without
    experts."""
    return int(parallel.data_parallel_index)


def engine_header(parallel: ParallelConfig, engine_id: str) -> int:
    """The ``X-data-parallel-rank`` that routes a request of the common API to this engine; -1 if
    the API is this engine's alone, or ignores the header."""
    # Without experts, vLLM tells each engine that it is alone, but numbers their ids.
    is_named = engine_id.endswith(f"_dp{parallel.data_parallel_index}")
    is_one_of_many = is_named or parallel.data_parallel_size > 1
    has_header = is_one_of_many and not parallel.local_engines_only
    return engine_index(parallel) if has_header else -1
