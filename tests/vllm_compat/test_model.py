"""What is read off vLLM's configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs

from lmcache_connector.vllm_compat.model import ModelDescription, describe_model
from tests.support.vllm_configs import BLOCK_SIZE, LAYERS, full_attention, kv_cache, vllm_config


def describe(
    config: VllmConfig, cache: KVCacheConfig, chunk_size: int | None = 128
) -> ModelDescription:
    return describe_model(config, cache, chunk_size=chunk_size)


def test_a_tiny_llama_is_described(model: Path) -> None:
    found = describe(vllm_config(model), kv_cache(), chunk_size=64)
    assert found.world_size == 1
    (layout,) = found.parts
    assert layout.part.block_size == BLOCK_SIZE
    assert layout.groups[0].names == tuple(LAYERS)
    geometry = layout.geometries[0]
    assert geometry.layer_widths == (2 * 32 * 2,) * 2
    assert geometry.num_tokens == 64
    assert geometry.bytes_per_token == 2 * 2 * 2 * 32 * 2  # layers, heads, K and V, bfloat16


def test_two_ranks_share_the_heads_and_the_identity(model: Path) -> None:
    one = describe(vllm_config(model), kv_cache())
    two = describe(vllm_config(model, tensor_parallel_size=2), kv_cache(full_attention(1)))
    assert two.world_size == 2
    shards = [tuple(geometry.shards) for geometry in two.parts[0].geometries]
    assert [shard for rank in shards for shard in rank] == list(one.parts[0].geometries[0].shards)
    assert two.configuration == one.configuration, "keys do not depend on tensor parallelism"


def test_stages_with_layers_of_other_kinds_name_what_the_whole_names(model: Path) -> None:
    """One has full attention, the other a window: neither contradicts the other."""
    full = full_attention()
    windowed = replace(full, sliding_window=64)
    mixed = UniformTypeKVCacheSpecs(BLOCK_SIZE, dict(zip(LAYERS, (full, windowed), strict=True)))
    config = vllm_config(model)
    whole = describe(config, kv_cache(mixed)).configuration
    stages = [describe(config, kv_cache(spec)).configuration for spec in (full, windowed)]
    assert stages[0] != stages[1]
    assert stages[0] | stages[1] == stages[1] | stages[0] == whole
