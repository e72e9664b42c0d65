"""Where vLLM may take the paged cache's memory away without another step."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_connector.vllm_compat.api.names import KVConnectorBase_V1, may_sleep_unseen
from tests.support.vllm_configs import vllm_config


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize(
    ("num_ranks", "executor", "has_workers"),
    [(1, None, False), (1, "mp", True), (2, None, True)],
)
@pytest.mark.parametrize("own_process", [True, False])
def test_only_workers_of_an_engine_stepped_by_its_user_may_sleep_unseen(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    sleeps: bool,
    num_ranks: int,
    executor: str | None,
    has_workers: bool,
    own_process: bool,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(own_process)))
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    ranks = {"tensor_parallel_size": num_ranks, "distributed_executor_backend": executor}
    config = vllm_config(model, **ranks)
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", sleeps)
    assert may_sleep_unseen(config) == (sleeps and has_workers and not own_process)
    notice = "unregister_kv_caches"
    monkeypatch.setattr(KVConnectorBase_V1, notice, lambda self: None, raising=False)
    assert not may_sleep_unseen(config)  # every rank is told
