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
"""Tokens that a token sees in a windowed layer, itself included; for Llama 4, a local chunk."""
_SEED = 20251122
_SHAPE = ModelShape(vocab_size=2048, max_position=16384)


@dataclass(frozen=True, slots=True)
class Family:
    """``title`` and ``kv``: the family's members and the makeup of its KV, as docs/support.md says.
    ``model``, ``config`` and ``sizes``: Transformers' classes and the arguments of the latter.
    ``engine_args``: what vLLM needs to be told beside the model. ``needs``: a package that vLLM
    imports for the family alone.
    """

    title: str
    kv: str
    model: str
    config: str
    sizes: dict[str, Any]
    engine_args: dict[str, Any] = field(default_factory=dict)
    needs: str = ""

    @property
    def has_states(self) -> bool:
        return "mamba_cache_mode" in self.engine_args


COMMON_SIZES: dict[str, Any] = {
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


_DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_ALIGNED: dict[str, Any] = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}


def _by_blocks(size: int) -> dict[str, Any]:
    """vLLM's CPU build crashes if a step of Mamba-2 goes on after a block that it has filled, so
    that no step may be longer than a block. ``size``: the tokens of a block."""
    return _ALIGNED | {"max_num_batched_tokens": size, "max_num_seqs": 8}


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
            "windows and full attention, with heads and blocks of other sizes; the last layers "
            "have the KV of earlier ones",
            "Gemma4ForCausalLM",
            "Gemma4TextConfig",
            _layers("wwfwf", 1)
            | {
                "sliding_window": WINDOW,
                "vocab_size_per_layer_input": _SHAPE.vocab_size,
                "hidden_size_per_layer_input": 32,
                "num_kv_shared_layers": 2,
                "per_layer_config": {"02": {"head_dim": 128}, "04": {"head_dim": 128}},
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
            | _DELTA_NET
            | {
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
                "num_experts": 4,
                "num_experts_per_tok": 4,  # all, so that the choice cannot depend on the batch
            },
            _ALIGNED,
        ),
        "qwen3.5": Family(
            "Qwen3.5",
            "recurrent states (GDN) and full attention",
            "Qwen3_5ForCausalLM",
            "Qwen3_5TextConfig",
            _layers("wf", 2, "linear_attention") | _DELTA_NET,
            _ALIGNED,
            needs="torchvision",
        ),
        "granite4": Family(
            "Granite 4",
            "recurrent states (Mamba-2) and full attention",
            "GraniteMoeHybridForCausalLM",
            "GraniteMoeHybridConfig",
            {
                "layer_types": ["mamba", "attention"] * 2,
                "num_hidden_layers": 4,
                "mamba_n_heads": 8,
                "mamba_d_head": 64,
                "mamba_d_state": 64,
                "mamba_chunk_size": 64,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "shared_intermediate_size": 256,
                "position_embedding_type": "rope",
            },
            _by_blocks(384),
        ),
        "falcon-h1": Family(
            "Falcon-H1",
            "recurrent states (Mamba-2) and full attention in every layer",
            "FalconH1ForCausalLM",
            "FalconH1Config",
            {
                "num_hidden_layers": 2,
                "mamba_d_ssm": 512,
                "mamba_n_heads": 8,
                "mamba_d_head": 64,
                "mamba_d_state": 64,
                "mamba_chunk_size": 64,
            },
            _by_blocks(384),
        ),
        "nemotron-h": Family(
            "Nemotron-H",
            "recurrent states (Mamba-2) and full attention",
            "NemotronHForCausalLM",
            "NemotronHConfig",
            {
                "layers_block_type": ["mamba", "attention"] * 2,
                "mamba_num_heads": 8,
                "mamba_head_dim": 64,
                "ssm_state_size": 64,
                "n_groups": 1,
                "chunk_size": 64,
            },
            _by_blocks(384),
        ),
        "zamba2": Family(
            "Zamba2",
            "recurrent states (Mamba-2), in some layers with full attention beside them",
            "Zamba2ForCausalLM",
            "Zamba2Config",
            {
                "layers_block_type": ["mamba", "hybrid"] * 2,
                "num_hidden_layers": 4,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "mamba_d_state": 64,
                "n_mamba_heads": 8,
                "chunk_size": 64,
            },
            _by_blocks(128),
        ),
        "lfm2": Family(
            "LFM2",
            "states of short convolutions, and full attention",
            "Lfm2ForCausalLM",
            "Lfm2Config",
            _layers("wf", 2, "conv")
            | {
                "block_auto_adjust_ff_dim": False,
                "block_multiple_of": 32,
                "block_dim": 256,
                "conv_dim": 256,
            },
            _ALIGNED,
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
    config = getattr(transformers, family.config)(**COMMON_SIZES | family.sizes)
    make: Callable[[Any], Any] = getattr(transformers, family.model)
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = make(config).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(folder, _SHAPE)
    done.write_text(name)
    return folder
