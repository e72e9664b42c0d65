"""What separates models from each other, and what does not: with vLLM's own configurations.

Every case runs ``EngineArgs(...).create_engine_config()``, as ``vllm serve`` would.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import TINY
from lmcache_connector.vllm_compat import identity
from lmcache_connector.vllm_compat.model import describe_model
from lmcache_connector.vllm_compat.weights import weights_identity
from tests.support.device import NEEDS_FP8_KV
from tests.support.engines.tiny_variants import build_seeing_model
from tests.support.vllm_configs import kv_cache, vllm_config

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def fingerprint(model: Path, model_digest: str = "full", **args: Any) -> str:
    """Of the model as an engine started with these arguments would describe it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        get_kv_quant_mode,
    )

    if args.get("tensor_parallel_size", 1) * args.get("pipeline_parallel_size", 1) > 1:
        args["distributed_executor_backend"] = "mp"
    config = EngineArgs(model=str(model), **args).create_engine_config()
    found = config.model_config
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=found.get_num_kv_heads(config.parallel_config),
        head_size=found.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, found),
        kv_quant_mode=get_kv_quant_mode(config.cache_config.cache_dtype),
    )
    num_layers = TINY.num_layers // args.get("pipeline_parallel_size", 1)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(num_layers)]
    groups = [KVCacheGroupSpec(layers, spec)]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    described = describe_model(config, cache, chunk_size=128)
    weights = weights_identity(config, model_digest, model.parent / "kept").name
    return identity.fingerprint({"weights": weights, **described.configuration})


@pytest.fixture(scope="module")
def plain(model: Path) -> str:
    return fingerprint(model)


@pytest.mark.parametrize(
    "args",
    [
        {"served_model_name": "another"},
        {"max_model_len": 512},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"block_size": 32},
        {"block_size": 64},
        {"dtype": "bfloat16"},  # what auto means here
        {"kv_cache_dtype": "auto"},
        {"seed": 7},
        {"enforce_eager": True},
        {"gpu_memory_utilization": 0.2},
        {"max_num_batched_tokens": 2048, "max_num_seqs": 3},
        {"enable_prefix_caching": False},
        {"revision": "main"},  # of a folder it means nothing
        {"generation_config": "vllm"},
        {"trust_remote_code": True},
        {"runner": "generate"},
        {"load_format": "safetensors"},
        {"enable_lora": True, "max_loras": 3, "max_lora_rank": 32},
        {"attention_backend": "CPU_ATTN"},
        {"disable_log_stats": True},
        {"async_scheduling": True},
        {"compilation_config": {"mode": 0}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"tokenizer_revision": "old"},
    ],
    ids=lambda args: ",".join(args),
)
def test_how_an_instance_runs_is_no_part_of_the_root(
    model: Path, plain: str, args: dict[str, Any]
) -> None:
    assert fingerprint(model, **args) == plain


@pytest.mark.parametrize(
    "args",
    [
        {"dtype": "float32"},
        {"dtype": "float16"},
        pytest.param({"kv_cache_dtype": "fp8_e4m3"}, marks=NEEDS_FP8_KV),
        pytest.param({"kv_cache_dtype": "fp8_e5m2"}, marks=NEEDS_FP8_KV),
        {"quantization": "fp8"},
        pytest.param(
            {"kv_cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": ["0"]},
            marks=NEEDS_FP8_KV,
        ),
        {"kv_cache_dtype_skip_layers": ["0"]},
        {"enable_lora": True, "lora_target_modules": ["q_proj"]},
        {"enable_lora": True, "lora_dtype": "float16"},
        {"additional_config": {"anything": 1}},
        {"load_format": "tensorizer"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 1e4, **ROPE}}},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"hf_overrides": {"architectures": ["MistralForCausalLM"]}},
    ],
    ids=lambda args: ",".join(f"{k}={v}" for k, v in args.items())[:60],
)
def test_what_changes_kv_bytes_is_part_of_the_root(
    model: Path, plain: str, args: dict[str, Any]
) -> None:
    assert fingerprint(model, **args) != plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_CPU_INT4_W4A8", "0"),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "medium"),
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"weight_bits": 4}'),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
        ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT4"),
    ],
)
def test_variables_that_change_arithmetic_are_part_of_the_root(
    model: Path, plain: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert fingerprint(model) != plain


def test_no_file_names_dummy_weights(model: Path) -> None:
    """They differ from one tensor-parallel size to the other."""
    config = vllm_config(model)
    config.load_config.load_format = "dummy"
    assert weights_identity(config, "full", model.parent / "kept").name == ""


def edited(model: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the model with another ``config.json``."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "noise",
    [
        {},
        {"_name_or_path": "org/another-name"},
        {"transformers_version": "4.1.0"},
        {"use_cache": False},
    ],
    ids=lambda noise: ",".join(noise) or "copy",
)
def test_a_copy_elsewhere_is_the_same_model(
    model: Path, plain: str, tmp_path: Path, noise: dict[str, Any]
) -> None:
    assert fingerprint(edited(model, tmp_path / "copy", lambda c: c.update(noise))) == plain


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}},
        {"hidden_act": "gelu"},
        {"a_setting_of_tomorrow": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_copy_that_computes_otherwise_is_another_model(
    model: Path, plain: str, tmp_path: Path, change: dict[str, Any]
) -> None:
    assert fingerprint(edited(model, tmp_path / "copy", lambda c: c.update(change))) != plain


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_seeing_model(tmp_path_factory.mktemp("models") / "seeing")


@pytest.mark.parametrize(
    ("args", "is_same"),
    [
        ({"mm_processor_kwargs": {"do_rescale": False}}, False),
        ({"mm_encoder_attn_dtype": "fp8"}, False),
        ({"media_io_kwargs": {"video": {"num_frames": 3}}}, False),
        ({"mm_processor_cache_gb": 0}, True),
        ({"limit_mm_per_prompt": {"image": 2}}, True),
    ],
    ids=lambda args: next(iter(args)) if isinstance(args, dict) else "",
)
def test_how_pictures_are_prepared_is_part_of_the_root(
    seeing: Path, args: dict[str, Any], is_same: bool
) -> None:
    plain = fingerprint(seeing, max_model_len=2048)
    assert (fingerprint(seeing, max_model_len=2048, **args) == plain) is is_same


def test_a_name_of_the_users_stands_for_the_weights(
    model: Path, plain: str, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    next(copy.glob("*.safetensors")).write_bytes(b"")
    assert fingerprint(copy, "mine") == fingerprint(model, "mine")
    assert len({plain, fingerprint(model, "mine"), fingerprint(model, "yours")}) == 3


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 256,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize("rope", [LONG_ROPE, DYNAMIC], ids=lambda rope: str(rope["rope_type"]))
def test_the_length_counts_where_angles_may_depend_on_it(model: Path, rope: dict[str, Any]) -> None:
    def of(length: int) -> str:
        overrides = {"rope_parameters": rope, "original_max_position_embeddings": 256}
        return fingerprint(model, max_model_len=length, hf_overrides=overrides)

    assert of(256) == of(256) != of(512)


@pytest.mark.parametrize("rope", [ROPE, {"rope_type": "linear", "factor": 2.0}])
def test_the_length_does_not_count_where_angles_follow_from_positions(
    model: Path, rope: dict[str, Any]
) -> None:
    overrides = {"rope_parameters": {"rope_theta": 1e4, **rope}}
    one, two = (
        fingerprint(model, max_model_len=length, hf_overrides=overrides) for length in (256, 512)
    )
    assert one == two


def test_the_length_counts_for_models_nobody_has_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin may register a class of its own under a known name."""
    from vllm.model_executor.models import ModelRegistry

    config = vllm_config(model)
    plain = identity.configuration_digests(config, kv_cache(), [None])
    ours = dataclasses.replace(ModelRegistry.models["LlamaForCausalLM"], module_name="a_plugin")
    monkeypatch.setitem(ModelRegistry.models, "LlamaForCausalLM", ours)
    one = identity.configuration_digests(config, kv_cache(), [None])
    changed = {name for name in one if one[name] != plain.get(name)}
    assert changed == {"model_class", "model_code", "model_config"}
    config.model_config.max_model_len //= 2
    two = identity.configuration_digests(config, kv_cache(), [None])
    assert {name for name in two if two[name] != one[name]} == {"model_config"}
