"""The cores that vLLM's build for CPUs computes with, beside a connector: held against vLLM's own
choice, made for this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, ParallelConfig

from lmcache_connector.vllm_compat.machines import core_warning

omp = pytest.importorskip("vllm.utils.ompmultiprocessing", reason="vLLM 0.31 chooses elsewhere")


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)


def config(*, connector: bool) -> Any:
    transfer = KVTransferConfig(kv_connector="LMCacheTieredConnector", kv_role="kv_both")
    return SimpleNamespace(
        parallel_config=ParallelConfig(), kv_transfer_config=transfer if connector else None
    )


def test_a_connector_costs_a_core_unless_the_warning_is_heeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = omp.OMPProcessManager(config(connector=False))
    beside = omp.OMPProcessManager(config(connector=True))
    assert beside.reserve_cpu_num == alone.reserve_cpu_num + 1
    warning = core_warning(config(connector=True))
    assert warning is not None
    (setting,) = (word for word in warning.split() if word.startswith("VLLM_"))
    monkeypatch.setenv(*setting.split("="))
    heeded = omp.OMPProcessManager(config(connector=True))
    assert heeded.cpu_lists == alone.cpu_lists
    assert core_warning(config(connector=True)) is None


def test_nixl_keeps_the_core_of_its_thread() -> None:
    """It never sleeps."""
    beside = config(connector=True)
    pair = [{"kv_connector": "NixlConnector"}, {"kv_connector": "LMCacheTieredConnector"}]
    beside.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": pair},
    )
    assert core_warning(beside) is None
    del pair[0]
    assert core_warning(beside) is not None
