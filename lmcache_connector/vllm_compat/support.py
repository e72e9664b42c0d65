"""Which set-ups of vLLM are supported, and the rule that each layer's KV follows.

Everything else is refused at start with one sentence that says what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.triton_utils import triton
from vllm.triton_utils.importing import TritonPlaceholder
from vllm.v1.executor import Executor, UniProcExecutor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.vllm_compat.drafter import drafter_problems

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

HAS_TRITON = not isinstance(triton, TritonPlaceholder)
_WITHOUT = "start without --kv-transfer-config"


def check_setup(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises :class:`UnsupportedError` for the first unsupported property of the set-up."""
    for what, remedy in _problems(vllm_config, kv_cache_config):
        raise unsupported(what, remedy)
    for _, group in kept_groups(kv_cache_config):
        for name, spec in layer_specs(group).items():
            rule_of(name, spec)  # refuse a layer before computing sizes from it


def unsupported(what: str, remedy: str = _WITHOUT) -> UnsupportedError:
    """An error that names what is not supported, and what to do instead."""
    return UnsupportedError(f"lmcache-connector does not support {what}: {remedy}.")


def kept_groups(kv_cache_config: KVCacheConfig) -> list[tuple[int, KVCacheGroupSpec]]:
    """The KV cache groups that chunks are made of, with their numbers: all except rings.

    A ring holds a request's latest tokens, which vLLM turns into one entry of another group
    whenever it is full. At the end of a block it is empty, and vLLM starts an empty one after its
    own hits. Raises :class:`UnsupportedError` for groups that vLLM rebuilds in other ways after a
    hit, keeps in a separate pool, or does not pass to connectors.
    """
    if kv_cache_config.host_group_ids:
        raise unsupported("HiSparse, with its KV in a pool of vLLM's own on the host")
    kept = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        name, spec = group.layer_names[0], group.kv_cache_spec
        if number in kv_cache_config.prefix_cacheable_group_ids:
            kept.append((number, group))
        elif spec.prefix_cacheable:
            raise unsupported(f"layer {name}, whose KV vLLM does not pass to connectors")
        elif spec.prefix_replay_tokens:
            raise unsupported(f"the {type(spec).__name__} of layer {name} yet")
    return kept


def layer_specs(group: KVCacheGroupSpec) -> dict[str, Any]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def first_spec(group: KVCacheGroupSpec) -> Any:
    """The spec that vLLM shows to the scheduler's process."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def rule_of(name: str, spec: Any) -> tuple[Rule, int]:
    """The rule of layer ``name``, and its span in tokens. Raises ``UnsupportedError`` for a layer
    without a supported rule.
    """
    if type(spec) is MambaSpec:
        return _state_rule(name, spec)
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        rule, span = Rule.PREFIX, 0
    elif type(spec) is SlidingWindowSpec:
        rule, span = Rule.WINDOW, spec.sliding_window + spec.extra_retained_tokens
    elif type(spec) is ChunkedLocalAttentionSpec:
        rule, span = Rule.CHUNKED, spec.attention_chunk_size
    elif type(spec) is SlidingWindowMLASpec:
        raise unsupported(f"the windows of compressed latents of layer {name} (DeepSeek V4) yet")
    else:
        raise unsupported(f"the {type(spec).__name__} of layer {name} yet")
    if getattr(spec, "non_causal", False):  # only full attention has the field
        raise unsupported(f"the attention to later tokens of layer {name}")
    if spec.tokens_per_state != 1 or spec.num_heads != spec.num_kv_heads:
        raise unsupported(f"the packed KV cache of layer {name} yet")
    return rule, span


def _state_rule(name: str, spec: MambaSpec) -> tuple[Rule, int]:
    if spec.mamba_cache_mode != "align":
        raise unsupported(
            f"recurrent states with --mamba-cache-mode {spec.mamba_cache_mode} (layer {name})",
            "start with --enable-prefix-caching --mamba-cache-mode align, where the model "
            "supports it",
        )
    return Rule.STATE, 0


def _problems(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[tuple[str, str]]:
    """Unsupported properties, each with a remedy."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if model.is_encoder_decoder:
        yield "encoder-decoder models", _WITHOUT
    if model.is_diffusion:
        yield "diffusion models, whose KV may be of tokens that they discard", _WITHOUT
    if vllm_config.aux_output_config.enabled:
        yield "--enable-return-routed-experts, since vLLM lacks those of loaded KV", "leave it out"
    multimodal = model.multimodal_config
    if model.uses_mrope and multimodal and multimodal.is_multimodal_pruning_enabled():
        yield (
            "pruned videos in models with M-RoPE yet, because vLLM learns the positions of later "
            "tokens only by computing the video",
            "start without --video-pruning-rate",
        )
    if parallel.enable_fault_tolerance or parallel.all2all_backend == "nixl_ep":
        yield "KV of failed ranks", "leave out --enable-fault-tolerance, --all2all-backend nixl_ep"
    if not kv_cache_config.kv_cache_groups:
        yield "models without a KV cache", _WITHOUT
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield (
            "context parallelism yet, which spreads the tokens of a chunk over ranks",
            "set --decode-context-parallel-size and --prefill-context-parallel-size to 1",
        )
    if _computes_prompts_at_once(vllm_config):
        yield (
            "MLA where vLLM computes each prompt in one step, as on CPUs without AMX",
            "the end of a prompt would not see the KV that was loaded for its beginning; start "
            "without --kv-transfer-config, or use a CPU with AMX or a GPU",
        )
    if _has_a_scheduler_per_rank(vllm_config):
        yield (
            "the external_launcher executor with several ranks per engine",
            "there, every rank has a scheduler, and decides by times of its own; use the mp or the "
            "ray executor, or engines of one rank",
        )
    yield from drafter_problems(vllm_config)
    if vllm_config.speculative_config is not None and any(
        isinstance(first_spec(group), MambaSpec) for group in kv_cache_config.kv_cache_groups
    ):
        yield from _problems_of_drafted_states(vllm_config)


def runs_drafted_states() -> bool:
    """Whether vLLM can keep a state for each draft, and go on from that of the last accepted one:
    it copies states by Triton, and even with Triton its CPU kernels fail for drafts."""
    return HAS_TRITON and not current_platform.is_cpu()


def _problems_of_drafted_states(vllm_config: VllmConfig) -> Iterator[tuple[str, str]]:
    what = "speculative decoding beside recurrent states"
    if not runs_drafted_states():
        yield (
            f"{what} on CPUs and where vLLM has no Triton",
            "vLLM itself fails there; start without --speculative-config",
        )
    if vllm_config.use_v2_model_runner:
        yield f"{what} in vLLM's model runner V2 yet", "set VLLM_USE_V2_MODEL_RUNNER=0"
    if vllm_config.scheduler_config.async_scheduling:
        yield (
            f"{what} with asynchronous scheduling, where vLLM 0.32 may take another request's "
            "number of accepted tokens (vllm#51571)",
            "start with --no-async-scheduling",
        )


def _computes_prompts_at_once(vllm_config: VllmConfig) -> bool:
    """vLLM's reference attention for MLA sees only tokens of the current step, so vLLM itself has
    disabled chunked prefill and its prefix cache."""
    return (
        current_platform.is_cpu()
        and vllm_config.model_config.use_mla
        and not vllm_config.scheduler_config.enable_chunked_prefill
    )


def _has_a_scheduler_per_rank(vllm_config: VllmConfig) -> bool:
    """Whether an engine's ranks are started from outside, each with its own scheduler."""
    parallel = vllm_config.parallel_config
    # world_size would include the ranks of all data-parallel engines.
    num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return num_ranks > 1 and issubclass(Executor.get_class(vllm_config), UniProcExecutor)
