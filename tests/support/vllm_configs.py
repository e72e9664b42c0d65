"""vLLM's configuration of a tiny model, as its scheduler and workers hand it to a connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

BLOCK_SIZE = 16
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(2)]


def vllm_config(model: Path, **parallel: Any) -> VllmConfig:
    if parallel:
        parallel.setdefault("distributed_executor_backend", "mp")
    return VllmConfig(
        model_config=ModelConfig(model=str(model), tokenizer=str(model), seed=0),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        parallel_config=ParallelConfig(**parallel),
    )


def full_attention(num_kv_heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads, head_size=32, dtype=torch.bfloat16
    )


def kv_cache(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(list(LAYERS), spec) for spec in specs or (full_attention(),)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
