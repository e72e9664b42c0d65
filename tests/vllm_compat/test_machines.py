"""Which of several engines this is, and on which machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lmcache_connector.vllm_compat.machines import engine_header, engine_index


def parallel(**changes: Any) -> Any:
    alone: dict[str, Any] = {
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "local_engines_only": False,
    }
    return SimpleNamespace(**(alone | changes))


def test_engines_behind_one_api_are_told_apart() -> None:
    """vLLM leaves ``data_parallel_rank`` at 0 in each of them, unless the model has experts."""
    second = parallel(data_parallel_index=1)
    assert (engine_index(second), engine_header(second, "e_dp1")) == (1, 1)
    with_experts = parallel(data_parallel_index=1, data_parallel_size=2)
    assert engine_header(with_experts, "e") == 1
    behind_its_own = parallel(data_parallel_index=1, local_engines_only=True)
    assert engine_header(behind_its_own, "e_dp1") == -1


def test_vllm_has_these_fields() -> None:
    from vllm.config import ParallelConfig

    real = ParallelConfig()
    assert all(hasattr(real, name) for name in vars(parallel()))
    assert (engine_index(real), engine_header(real, "e")) == (0, -1)
