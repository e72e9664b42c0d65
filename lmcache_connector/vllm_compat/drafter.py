"""Drafters of speculative decoding that have KV of their own.

A drafter's layers are in vLLM's KV cache groups beside the model's and share their blocks. They are
stored and loaded like layers of the model, with three particulars:

- An EAGLE or MTP head reads the token after the one it computes. vLLM's own prefix cache therefore
  drops the last block of a hit; here chunk keys include that token (``lookahead``).
- A step without the drafter writes no KV into its layers. vLLM's model runner V1 skips it in a
  step with a request of more than ``max_len`` tokens. V2 never does, but drafts past the model's
  last position overwrite the KV there.
- The drafter's weights and configuration are in the root of all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
_WITH_KV = frozenset({"draft_model", "eagle", "eagle3", "mtp"})


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter with KV. ``model``: vLLM's configuration. ``lookahead``: number of later tokens
    that the KV of a token depends on. ``max_len``: a step writes the drafter's KV if no request has
    more tokens at its end, drafts to verify included."""

    model: ModelConfig
    lookahead: int
    max_len: int


def find_drafter(vllm_config: VllmConfig) -> Drafter | None:
    """The drafter, if it has KV."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_KV:
        return None
    model = limit = speculative.draft_model_config
    if vllm_config.use_v2_model_runner and speculative.method != "draft_model":
        limit = vllm_config.model_config  # vLLM gives a head the positions of its model
    return Drafter(
        model,
        lookahead=vllm_config.num_prefill_lookahead_tokens,
        # Each draft takes a position after the last token.
        max_len=limit.max_model_len - speculative.num_speculative_tokens,
    )


def drafter_problems(vllm_config: VllmConfig) -> Iterator[tuple[str, str]]:
    """Unsupported properties, each with a remedy."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    has_kv = speculative.method not in _WITHOUT_KV
    # vLLM's model runner V1 does not end the connector's steps on the other stages.
    is_refused = has_kv or not vllm_config.use_v2_model_runner
    if is_refused and vllm_config.parallel_config.pipeline_parallel_size > 1:
        yield "a drafter on the last of several pipeline stages yet", "use one stage"
    if not has_kv:
        return
    if speculative.method not in _WITH_KV:
        yield (
            f"speculative decoding with {speculative.method!r} yet",
            f"use {', '.join(sorted(_WITH_KV | _WITHOUT_KV))}, or none",
        )
    if speculative.use_multi_module_mtp():
        yield (
            "MTP with several modules yet, because later modules read drafts of earlier ones",
            "set num_speculative_tokens to 1",
        )
    if speculative.disable_eagle_block_drop:
        yield (
            "disable_eagle_block_drop, which leaves a drafter KV of another prompt's next token",
            "leave it out of --speculative-config",
        )
    if speculative.kv_cache_dtype not in (None, vllm_config.cache_config.cache_dtype):
        yield "a drafter's own kv_cache_dtype yet", "leave it out of --speculative-config"
