"""Tiny models of random weights of the families people serve, by what their KV is made of.

Each is a configuration of Transformers' own model of that family; the same family gives the same
weights, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from examples.tiny_model import ModelShape, save_tokenizer

WINDOW = 512
"""Tokens a windowed layer sees, itself included; of Llama 4, those of one run."""
_SEED = 20251122
_SHAPE = ModelShape(vocab_size=2048, max_position=16384)


@dataclass(frozen=True, slots=True)
class Family:
    """``title`` and ``kv``: who is of this family, and what its KV is made of, as the README says.
    ``model``, ``config`` and ``sizes``: Transformers' classes and the arguments of the latter.
    ``engine_args``: what vLLM needs to be told beside the model.
    """

    title: str
    kv: str
    model: str
    config: str
    sizes: dict[str, Any]
    engine_args: dict[str, Any] = field(default_factory=dict)


_COMMON: dict[str, Any] = {
    "vocab_size": _SHAPE.vocab_size,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": _SHAPE.max_position,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _layers(pattern: str, repeats: int, window: str = "sliding_attention") -> dict[str, Any]:
    """``pattern``: ``w`` for a layer with a window (or whatever else), ``f`` for one without."""
    kinds = {"w": window, "f": "full_attention"}
    types = [kinds[letter] for letter in pattern * repeats]
    return {"layer_types": types, "num_hidden_layers": len(types)}


FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "mistral": Family(
            "Mistral 7B v0.1",
            "a window in every layer",
            "MistralForCausalLM",
            "MistralConfig",
            {"sliding_window": WINDOW, "num_hidden_layers": 3},
        ),
        "ministral": Family(
            "Ministral",
            "windows and full attention, 3:1",
            "MistralForCausalLM",
            "MistralConfig",
            _layers("fwww", 1) | {"sliding_window": WINDOW},
        ),
        "gemma3": Family(
            "Gemma 3",
            "windows and full attention, 1:1",
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            _layers("wf", 2) | {"sliding_window": WINDOW},
        ),
        "gemma3 5:1": Family(
            "Gemma 3",
            "windows and full attention, 5:1",
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            _layers("wwwwwf", 1) | {"sliding_window": WINDOW},
        ),
        "gemma4": Family(
            "Gemma 4",
            "windows and full attention, with heads and blocks of other sizes",
            "Gemma4ForCausalLM",
            "Gemma4TextConfig",
            _layers("wwf", 1)
            | {
                "sliding_window": WINDOW,
                "vocab_size_per_layer_input": _SHAPE.vocab_size,
                "hidden_size_per_layer_input": 32,
                "per_layer_config": {"02": {"head_dim": 128}},
            },
        ),
        "gpt-oss": Family(
            "gpt-oss",
            "windows and full attention, with sinks",
            "GptOssForCausalLM",
            "GptOssConfig",
            _layers("wf", 2)
            | {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        "llama4": Family(
            "Llama 4",
            "chunked local and full attention",
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            _layers("wwwf", 1, "chunked_attention")
            | {
                "attention_chunk_size": WINDOW,
                "intermediate_size_mlp": 256,
                "num_local_experts": 2,
                "no_rope_layers": [1, 1, 1, 0],
            },
        ),
        "qwen3-next": Family(
            "Qwen3-Next",
            "recurrent states (GDN) and full attention",
            "Qwen3NextForCausalLM",
            "Qwen3NextConfig",
            _layers("wf", 2, "linear_attention")
            | {
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
                "num_experts": 4,
                "num_experts_per_tok": 2,
            },
            {"enable_prefix_caching": True, "mamba_cache_mode": "align"},
        ),
    }
)


def build_family(name: str, folder: Path) -> Path:
    """Write the model to ``folder``, unless it is there; returns ``folder``."""
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    done = folder / "family.txt"
    if done.is_file():
        return folder
    disable_progress_bar()  # of writing one small file
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**_COMMON | family.sizes)
    make: Callable[[Any], Any] = getattr(transformers, family.model)
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = make(config).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(folder, _SHAPE)
    done.write_text(name)
    return folder
