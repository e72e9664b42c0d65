"""Tiny models of transformers that are made in memory, and what they compute without any tiers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from lmcache_connector.transformers import KVTiers, TieredCache
from tests.support.device import DEVICE

CHUNK = 32
SMALL = {"cpu_gib": 0.05, "compute_or_load": "always", "chunk_size": CHUNK}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2, "min_new_tokens": 2}
VOCABULARY = 64
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "vocab_size": VOCABULARY,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(family: str = "llama", **sizes: Any) -> Any:
    """Of random weights, the same each time, in float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(_SIZES | sizes))
    return AutoModelForCausalLM.from_config(config).eval().to(DEVICE)


def prompt_of(seed: int, length: int) -> torch.Tensor:
    """``[1, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (1, length), generator=generator).to(DEVICE)


def distance_from_plain(model: Any, cache: TieredCache, ids: torch.Tensor) -> float:
    """How far the KV of the prompt is from what the model computes alone, relative, in the layer
    that is farthest off."""
    plain = DynamicCache(config=model.config)
    model.generate(ids, past_key_values=plain, **GREEDY)
    expected = [half for layer in plain.layers for half in (layer.keys, layer.values)]
    length = ids.shape[1]
    pairs = [
        (mine[:, :, :length].double(), its[:, :, :length].double())
        for mine, its in zip(cache.tensors(), expected, strict=True)
    ]
    return max(float((mine - its).norm() / its.norm()) for mine, its in pairs)


def generate_right(model: Any, tiers: KVTiers, ids: torch.Tensor) -> int:
    """How many chunks were hits of a ``generate`` whose KV is what the model computes alone, and
    which has stored the rest."""
    cache, before = tiers.new_cache(), tiers.counts
    model.generate(ids, past_key_values=cache, **GREEDY)
    tiers.finish_stores()
    assert distance_from_plain(model, cache, ids) < 1e-4
    return tiers.counts.hit_chunks - before.hit_chunks
