"""Models of many families: a hit has the stored bytes, or the model is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.transformers import KVTiers
from tests.support.engines.tiny_generations import (
    CHUNK,
    GREEDY,
    SMALL,
    generate_right,
    prompt_of,
    tiny_model,
)

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = EXPERTS | {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 4096}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 4},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "gemma": {},
    "phi": {},
    "phi3": {},
    "gpt_neox": {},
    "gpt2": GPT2,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64, "pad_token_id": 1},
    "bloom": {"n_layer": 3, "n_head": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 4096, "use_cache": True},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_is_byte_equal_and_shared_by_prompts_of_one_prefix(family: str) -> None:
    model = tiny_model(family, **FAMILIES[family])
    first = prompt_of(1, 100)
    other = torch.cat([first[:, :60], prompt_of(2, 40)], 1)
    with KVTiers(model, SMALL) as tiers:
        cold = tiers.new_cache()
        model.generate(first, past_key_values=cold, **GREEDY)
        tiers.finish_stores()
        hit, before = tiers.new_cache(), tiers.counts
        model.generate(first, past_key_values=hit, **GREEDY)
        assert tiers.counts.hit_chunks - before.hit_chunks == 3
        for mine, its in zip(hit.tensors(), cold.tensors(), strict=True):
            assert torch.equal(mine[:, :, : 3 * CHUNK], its[:, :, : 3 * CHUNK])
        assert generate_right(model, tiers, other) == 1


BERT = {"num_key_value_heads": 4, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        ("bert", BERT, "later tokens"),
        ("roberta", BERT, "later tokens"),
        ("gemma2", {}, "sliding windows"),
        ("gpt_oss", {}, "sliding windows"),
        ("mamba", {}, "states"),
        ("xmod", BERT, "fails with a DynamicCache"),
    ],
)
def test_models_with_other_kv_are_refused(family: str, sizes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        KVTiers(tiny_model(family, **sizes), SMALL)


def test_models_split_over_processes_are_refused() -> None:
    """Each process would restore its own hits, and they would wait for each other."""
    model = tiny_model()
    model._tp_size = 2
    with pytest.raises(UnsupportedError, match="several processes"):
        KVTiers(model, SMALL)
