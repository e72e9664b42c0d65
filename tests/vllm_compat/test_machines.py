"""Which of several engines this is, and on which machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_connector.vllm_compat.machines import engine_header, engine_index, machine_host


def parallel(**changes: Any) -> Any:
    alone: dict[str, Any] = {
        "nnodes": 1,
        "distributed_executor_backend": "mp",
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "local_engines_only": False,
    }
    return SimpleNamespace(**(alone | changes))


def test_an_engine_alone_has_no_place_among_others() -> None:
    assert (engine_index(parallel()), engine_header(parallel(), "e")) == (0, -1)
    assert machine_host(parallel(), "e") == ""


def test_engines_behind_one_api_are_told_apart() -> None:
    """vLLM leaves ``data_parallel_rank`` at 0 in each of them, unless the model has experts."""
    second = parallel(data_parallel_index=1)
    assert (engine_index(second), engine_header(second, "e_dp1")) == (1, 1)
    with_experts = parallel(data_parallel_index=1, data_parallel_size=2)
    assert engine_header(with_experts, "e") == 1
    behind_its_own = parallel(data_parallel_index=1, local_engines_only=True)
    assert engine_header(behind_its_own, "e_dp1") == -1


@pytest.mark.parametrize(
    "spread",
    [{"nnodes": 2}, {"distributed_executor_backend": "ray"}, {"data_parallel_size": 2}],
)
def test_on_several_machines_each_has_its_own_address(
    spread: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.2")
    assert machine_host(parallel(**spread), "e") == "10.0.0.2"


def test_vllm_has_these_fields() -> None:
    from vllm.config import ParallelConfig

    real = ParallelConfig()
    assert all(hasattr(real, name) for name in vars(parallel()))
    assert (engine_index(real), engine_header(real, "e"), machine_host(real, "e")) == (0, -1, "")
