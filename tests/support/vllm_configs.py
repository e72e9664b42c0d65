"""vLLM's configuration of a tiny model, as its scheduler and workers hand it to a connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.structured_output import StructuredOutputManager

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


def engine_config(
    model: Path,
    *,
    depth: int,
    max_batched_tokens: int,
    max_model_len: int = 512,
    max_num_seqs: int = 6,
    world_size: int = 1,
    prefix_caching: bool = True,
    kv_events: bool = False,
    **more: Any,
) -> VllmConfig:
    """Of an engine without its model runner. ``depth``: steps scheduled ahead."""
    model_config = ModelConfig(
        model=str(model), tokenizer=str(model), max_model_len=max_model_len, seed=0
    )
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            async_scheduling=False,
            scheduler_reserve_full_isl=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching),
        parallel_config=ParallelConfig(
            tensor_parallel_size=world_size,
            distributed_executor_backend="mp" if world_size > 1 else None,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if kv_events
        else None,
        **more,
    )
    # The CPU platform switches this off; what it means to the scheduler is the same everywhere.
    config.scheduler_config.async_scheduling = depth > 1
    return config


def make_scheduler(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Scheduler:
    """vLLM's own, over ``kv_cache_config``, whose connector is the configured one."""
    config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    structured, size = StructuredOutputManager(config), BLOCK_SIZE
    return kind(config, kv_cache_config, structured, block_size=size, log_stats=True)


def full_attention(num_kv_heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads, head_size=32, dtype=torch.bfloat16
    )


def kv_cache(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(list(LAYERS), spec) for spec in specs or (full_attention(),)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def latents_with_index(seen_by: str = "worker") -> KVCacheConfig:
    """DeepSeek V3.2: two tensors per layer in one group, of which the process of the ``scheduler``
    sees the spec of one."""
    common: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1}
    index = {"head_size": 132, "dtype": torch.uint8, "cache_role": SparseCacheRole.INDEXER}
    latents = {"head_size": 576, "dtype": torch.bfloat16, "cache_dtype_str": "auto"}
    specs = {
        f"model.layers.{i}.self_attn.{name}": MLAAttentionSpec(**common, **sizes)
        for i in range(2)
        for name, sizes in (("indexer.k_cache", index), ("mla_attn", latents))
    }
    groups = [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs.from_specs(specs))]
    found = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    return found if seen_by == "worker" else generate_scheduler_kv_cache_config([found])
