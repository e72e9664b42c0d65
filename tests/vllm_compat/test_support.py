"""What is refused, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.vllm_compat.support import check_setup
from tests.support.vllm_configs import BLOCK_SIZE, full_attention, kv_cache, vllm_config


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


def test_several_groups_are_refused(model: Path) -> None:
    message = refused(vllm_config(model), kv_cache(full_attention(), full_attention()))
    assert "several KV cache groups" in message


def test_sliding_windows_are_refused(model: Path) -> None:
    window = SlidingWindowSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.bfloat16,
        sliding_window=64,
    )
    assert "SlidingWindowSpec" in refused(vllm_config(model), kv_cache(window))


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
