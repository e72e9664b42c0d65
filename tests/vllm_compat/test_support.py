"""What is refused, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.vllm_compat.support import check_setup
from tests.support.vllm_configs import kv_cache, vllm_config


class LaunchedFromOutside(ExecutorWithExternalLauncher):
    """As training frameworks derive theirs."""


def refused(config: VllmConfig, cache: KVCacheConfig) -> str:
    with pytest.raises(UnsupportedError) as raised:
        check_setup(config, cache)
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_one_group_of_full_attention_is_supported(model: Path) -> None:
    check_setup(vllm_config(model), kv_cache())


@pytest.mark.parametrize("backend", ["external_launcher", LaunchedFromOutside])
def test_a_scheduler_per_rank_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    """All would have to decide alike, and ours go by the time."""
    monkeypatch.setenv("RANK", "0")
    config = vllm_config(model, tensor_parallel_size=2, distributed_executor_backend=backend)
    message = refused(config, kv_cache())
    assert "the external_launcher executor with several ranks per engine" in message
    alone = vllm_config(model, data_parallel_size=2, distributed_executor_backend=backend)
    check_setup(alone, kv_cache())
