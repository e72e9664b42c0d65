"""Which rule a layer's KV follows, read off vLLM's KV cache spec; what follows none is refused."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.vllm_compat.support import unsupported


def rule_of(name: str, spec: Any) -> tuple[Rule, int]:
    """The rule of layer ``name`` and its span in tokens.

    Raises ``UnsupportedError`` for a layer whose KV is not what we take it to be.
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
    if getattr(spec, "non_causal", False):  # full attention alone has it
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
    if spec.num_speculative_blocks:
        raise unsupported(f"speculative decoding with the recurrent states of layer {name} yet")
    return Rule.STATE, 0
