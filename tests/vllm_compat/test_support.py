"""What is refused, in one sentence."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from vllm.config import (
    ModelConfig,
    MultiModalConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.models import ModelRegistry
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from lmcache_connector.errors import ConfigError, UnsupportedError
from lmcache_connector.vllm_compat import support
from lmcache_connector.vllm_compat.model import describe_model
from lmcache_connector.vllm_compat.support import check_setup, kept_groups
from tests.support.vllm_configs import full_attention, kv_cache, latents_with_index, vllm_config


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
    """All schedulers would have to decide alike, but ours decide by measured times."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # vLLM sets it and leaves it so
    config = vllm_config(model, tensor_parallel_size=2, distributed_executor_backend=backend)
    message = refused(config, kv_cache())
    assert "the external_launcher executor with several ranks per engine" in message
    alone = vllm_config(model, data_parallel_size=2, distributed_executor_backend=backend)
    check_setup(alone, kv_cache())


def test_a_diffusion_model_is_refused(model: Path) -> None:
    config = vllm_config(model)
    vars(config.model_config)["is_diffusion"] = True  # a cached property
    assert "diffusion models" in refused(config, kv_cache())


def test_experts_of_tokens_that_may_be_loaded_are_refused(model: Path) -> None:
    config = vllm_config(model)
    check_setup(config, kv_cache())
    config.aux_output_config.enable_return_routed_experts = True
    assert "--enable-return-routed-experts" in refused(config, kv_cache())


@pytest.mark.parametrize(
    "change", [{"enable_fault_tolerance": True}, {"all2all_backend": "nixl_ep"}], ids=str
)
def test_ranks_whose_failure_vllm_notices_late_are_refused(
    model: Path, change: dict[str, Any]
) -> None:
    """Their step has been stored by then."""
    config = vllm_config(model)
    vars(config.parallel_config).update(change)
    assert "KV of failed ranks" in refused(config, kv_cache())


def test_pruned_videos_are_refused_where_positions_follow_from_them(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config(model)
    config.model_config.multimodal_config = MultiModalConfig(video_pruning_rate=0.5)
    check_setup(config, kv_cache())
    monkeypatch.setattr(ModelConfig, "uses_mrope", True)
    assert "without --video-pruning-rate." in refused(config, kv_cache())
    config.model_config.multimodal_config = MultiModalConfig()
    check_setup(config, kv_cache())


RING = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
WINDOW = SlidingWindowMLASpec(
    block_size=16,
    num_kv_heads=1,
    head_size=32,
    dtype=torch.bfloat16,
    sliding_window=32,
    bounded_replay=True,
)


def test_a_ring_is_left_out(model: Path) -> None:
    cache = kv_cache(full_attention(), RING)
    check_setup(vllm_config(model), cache)
    assert [number for number, _ in kept_groups(cache)] == [0]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"kv_cache_spec": WINDOW}, "the SlidingWindowMLASpec of layer"),
        ({"enable_kv_transfer": False}, "whose KV vLLM does not pass to connectors"),
        ({"host_resident": True}, "HiSparse"),
    ],
)
def test_what_vllm_rebuilds_or_keeps_elsewhere_is_refused(
    model: Path, changed: dict[str, Any], what: str
) -> None:
    cache = kv_cache(full_attention(), full_attention())
    cache.kv_cache_groups[1] = replace(cache.kv_cache_groups[1], **changed)
    assert what in refused(vllm_config(model), cache)


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (0, "the windows of compressed latents of layer"),
        (1, "the packed KV cache of layer"),
    ],
    ids=["tokens that are being compressed", "compressed tokens"],
)
def test_kv_of_deepseek_v4_is_refused(model: Path, number: int, what: str) -> None:
    """vLLM's own layers describe it, as the model does not run on CPUs without AMX."""
    config = vllm_config(model)
    with set_current_vllm_config(config):
        layers: list[Any] = [
            CompressorStateCache(64, torch.float32, 4, "compressor"),
            DeepseekV4IndexerCache(132, torch.uint8, "indexer", config.cache_config, 4),
        ]
    spec = layers[number].get_kv_cache_spec(config)
    assert what in refused(config, kv_cache(full_attention(), spec))


def test_attention_to_an_encoder_is_refused(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"is_encoder_decoder": True}
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config))
    assert "encoder-decoder models" in refused(vllm_config(folder), kv_cache())


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_tokens_that_are_spread_over_ranks_are_refused(model: Path, kind: str) -> None:
    setup = vllm_config(model)
    setattr(setup.parallel_config, f"{kind}_context_parallel_size", 2)
    assert "context parallelism" in refused(setup, kv_cache())


def test_latents_that_vllm_computes_in_one_step_are_refused(tmp_path: Path) -> None:
    """On CPUs without AMX, vLLM would compute what follows a hit as if the prompt began there."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}
    config = DeepseekV3Config(**sizes, architectures=["DeepseekV3ForCausalLM"])
    config.save_pretrained(tmp_path)
    setup = vllm_config(tmp_path)
    setup.scheduler_config.enable_chunked_prefill = False  # as vLLM does where there is no AMX
    message = refused(setup, latents_with_index())
    assert "as on CPUs without AMX" in message
    setup.scheduler_config.enable_chunked_prefill = True
    check_setup(setup, latents_with_index())


def test_states_that_vllm_does_not_keep_are_refused(model: Path) -> None:
    states = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))
    message = refused(vllm_config(model), kv_cache(states))
    assert "does not support recurrent states with --mamba-cache-mode none" in message
    assert "start with --enable-prefix-caching --mamba-cache-mode align" in message


STATES = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")


@pytest.mark.parametrize(
    ("has_triton", "is_cpu"),
    [(False, True), (True, True), (False, False)],
    ids=["CPU", "CPU with Triton", "no Triton"],
)
def test_drafts_beside_states_are_refused_where_vllm_fails_among_them(
    model: Path, monkeypatch: pytest.MonkeyPatch, has_triton: bool, is_cpu: bool
) -> None:
    monkeypatch.setattr(support, "HAS_TRITON", has_triton)
    monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    message = refused(drafted_config(model), kv_cache(full_attention(), STATES))
    assert "beside recurrent states on CPUs and where vLLM has no Triton" in message


def test_drafts_beside_states_are_served_where_vllm_is_right_about_them(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = drafted_config(model)
    cache = kv_cache(full_attention(), STATES)
    monkeypatch.setattr(support, "HAS_TRITON", True)
    monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    check_setup(config, cache)
    config.scheduler_config.async_scheduling = True
    assert "vllm#51571): start with --no-async-scheduling" in refused(config, cache)
    check_setup(config, kv_cache())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert "set VLLM_USE_V2_MODEL_RUNNER=0" in refused(config, cache)


def test_vllm_still_copies_numbers_of_accepted_tokens_to_rows_that_may_move() -> None:
    """vllm#51571. When this fails, try asynchronous scheduling beside drafted states."""
    updates = inspect.getsource(GPUModelRunner._update_states_after_model_execute)
    assert "self.input_batch.num_accepted_tokens_cpu_tensor" in updates


def drafted_config(model: Path) -> VllmConfig:
    config = vllm_config(model)
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=2,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    config.scheduler_config.async_scheduling = False  # as vLLM has it on CPUs
    return config


@pytest.mark.parametrize(
    ("what", "is_there"),
    [
        ("the scan of Mamba-1, for Jamba", lambda: hasattr(torch.ops._C, "selective_scan_fwd")),
        (
            "the choice of experts by a sigmoid, for MiniMax-M2",
            lambda: 'assert self.scoring_func == "softmax"' not in inspect.getsource(CPURouter),
        ),
        ("a model of Bamba", lambda: "BambaForCausalLM" in ModelRegistry.get_supported_archs()),
    ],
    ids=["Jamba", "MiniMax-M2", "Bamba"],
)
def test_what_vllm_does_not_run_on_cpu_cannot_be_tested(
    what: str, is_there: Callable[[], bool]
) -> None:
    """vLLM 0.32. When this fails, add the family to ``tiny_families``."""
    assert not is_there(), what


def test_a_chunk_size_that_is_no_multiple_of_the_block_size_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        describe_model(vllm_config(model), kv_cache(), chunk_size=200)
    assert "chunk_size 200 is not a multiple of the block size 16" in str(raised.value)
