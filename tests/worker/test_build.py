"""The worker side as vLLM's settings say: what a failed start leaves behind."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.storage_backend.storage_manager import StorageManager
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmcache_connector.config.tiered import parse_config
from lmcache_connector.errors import ConfigError
from lmcache_connector.worker.build import build_worker
from lmcache_connector.worker.self_test import SelfTestError, _Trial
from tests.support.clock import within
from tests.support.engines.settings import tiered_transfer
from tests.support.processes import open_files
from tests.support.redis.servers import Server
from tests.support.vllm_configs import LAYERS, kv_cache, vllm_config

Caches = Callable[[KVCacheConfig], dict[str, torch.Tensor]]


def fail_to_start(model: Path, error: type[Exception], caches: Caches, **extra: Any) -> None:
    """Start a worker side with the connector's settings ``extra``. It leaves no thread of the
    product, and no memory of the CPU tier."""
    before, num_mapped = set(threading.enumerate()), count_mapped()
    settings, layers = vllm_config(model), kv_cache()
    settings.kv_transfer_config = KVTransferConfig(**tiered_transfer(cpu_gib=0.01, **extra))
    config = parse_config(settings.kv_transfer_config.kv_connector_extra_config)
    with pytest.raises(error):
        build_worker(config, settings, layers, caches(layers), kv_events=False, does_both=False)

    def left() -> set[str]:
        return {each.name for each in set(threading.enumerate()) - before} - {"PinMonitor-thread"}

    within(5.0, lambda: not left())
    assert left() == set()
    assert count_mapped() == num_mapped


def no_layers(_: KVCacheConfig) -> dict[str, torch.Tensor]:
    return {}


def all_layers(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    spec: Any = config.kv_cache_groups[0].kv_cache_spec
    shape = (config.num_blocks * 8, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    return {name: torch.zeros(shape, dtype=spec.dtype) for name in LAYERS}


def count_mapped() -> int:
    """Mappings and descriptors of CPU tiers in this process."""
    names = [*open_files(), *Path("/proc/self/maps").read_text().splitlines()]
    return sum("memfd:lmcache-connector" in name for name in names)


def test_a_start_without_its_layers_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path, valkey: Server
) -> None:
    folder = str(tmp_path / "host")
    fail_to_start(tiny_model, KeyError, no_layers, redis_url=valkey.url, host_folder=folder)


def test_a_start_whose_port_is_taken_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path, valkey: Server
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        fail_to_start(
            tiny_model,
            ConfigError,
            all_layers,
            redis_url=valkey.url,
            host_folder=str(tmp_path / "host"),
            peer_listen=f"127.0.0.1:{other.getsockname()[1]}",
        )


@pytest.mark.parametrize("error", [SelfTestError, OSError])
def test_a_start_that_fails_its_self_test_leaves_nothing_behind(
    tiny_model: Path,
    tmp_path: Path,
    valkey: Server,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
) -> None:
    monkeypatch.setattr(_Trial, "compare", raising(error))
    folder = str(tmp_path / "host")
    fail_to_start(tiny_model, error, all_layers, redis_url=valkey.url, host_folder=folder)


@pytest.mark.parametrize(("error", "raised"), [(RuntimeError, ConfigError), (OSError, OSError)])
def test_a_start_that_lmcache_fails_leaves_nothing_behind(
    tiny_model: Path,
    tmp_path: Path,
    valkey: Server,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    raised: type[Exception],
) -> None:
    """It has started its thread, and allocated the CPU tier."""
    monkeypatch.setattr(StorageManager, "get_non_allocator_backends", raising(error))
    folder = str(tmp_path / "host")
    fail_to_start(tiny_model, raised, all_layers, redis_url=valkey.url, host_folder=folder)


def raising(error: type[Exception]) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error("on purpose")

    return fail
