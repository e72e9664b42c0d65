"""Which models are handed over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.p2p.build import describe
from lmcache_connector.p2p.config import P2PConfig
from tests.support.vllm_configs import (
    BLOCK_SIZE,
    full_attention,
    kv_cache,
    latents_with_index,
    vllm_config,
)


def window() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.bfloat16,
        sliding_window=64,
    )


def two_groups() -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"model.layers.{i}.self_attn.attn"], spec)
        for i, spec in enumerate((window(), full_attention()))
    ]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize("cache", [two_groups(), kv_cache(window())], ids=["mixed", "windows"])
def test_models_with_windows_are_refused(model: Path, cache: KVCacheConfig) -> None:
    config = vllm_config(model)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="LMCacheP2PConnector", kv_role="kv_producer"
    )
    with pytest.raises(UnsupportedError, match=r"hand-overs of models with windows.*Redis"):
        describe(config, cache, P2PConfig())


def as_producer(config: VllmConfig) -> VllmConfig:
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="LMCacheP2PConnector", kv_role="kv_producer"
    )
    return config


def test_an_index_beside_the_latents_is_refused(model: Path) -> None:
    """The scheduler's process would take every layer for as narrow as the index."""
    with pytest.raises(UnsupportedError, match=r"hand-overs of models with an index.*Redis"):
        describe(as_producer(vllm_config(model)), latents_with_index(), P2PConfig())


def test_a_drafter_with_kv_is_refused(model: Path) -> None:
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 1}
    config = EngineArgs(model=str(model), speculative_config=draft).create_engine_config()
    with pytest.raises(UnsupportedError, match=r"hand-overs of models whose drafter.*Redis"):
        describe(as_producer(config), kv_cache(), P2PConfig())
