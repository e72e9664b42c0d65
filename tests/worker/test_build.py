"""The worker side as vLLM's settings say: what a failed start leaves behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig

from lmcache_connector.config.tiered import parse_config
from lmcache_connector.worker.build import build_worker
from tests.support.clock import within
from tests.support.engines.settings import tiered_transfer
from tests.support.redis.servers import Server
from tests.support.vllm_configs import kv_cache, vllm_config


def test_a_start_that_fails_leaves_no_thread_of_redis_or_peers(
    tiny_model: Path, tmp_path: Path, valkey: Server
) -> None:
    """The layers of the paged cache are missing."""
    before = set(threading.enumerate())
    settings = vllm_config(tiny_model)
    transfer = tiered_transfer(redis_url=valkey.url, host_folder=str(tmp_path / "host"))
    settings.kv_transfer_config = KVTransferConfig(**transfer)
    config = parse_config(settings.kv_transfer_config.kv_connector_extra_config)
    with pytest.raises(KeyError, match="layers"):
        build_worker(config, settings, kv_cache(), {}, kv_events=False)
    within(5.0, lambda: set(threading.enumerate()) <= before)
    assert set(threading.enumerate()) <= before
