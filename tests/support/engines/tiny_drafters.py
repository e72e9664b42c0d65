"""Tiny models with drafters that have their own KV, made so that the drafts depend on this KV.

With random weights attention hardly matters, and a drafter without its KV drafts as well as one
with it. So the model's one layer attends sharply, and adds far more than it passes on. The EAGLE
head is that layer, on the same embeddings: it drafts what the model says, but for the first token
of the prompt, which it never sees. The others are random.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from examples.tiny_model import ModelShape, build_tiny_model, save_tokenizer
from tests.support.engines.tiny_families import COMMON_SIZES, FAMILIES, build_family

NUM_DRAFTS = 3
BESIDE_STATES = ("ngram", "mtp", "eagle3")
"""Methods of :func:`build_states_with_drafts`."""
_SHAPE = ModelShape(num_layers=1)
_DEEP = ModelShape(num_layers=7)  # EAGLE-3 reads the outputs of layers 2, 3 and 4 of these
_WITH_STATES = ModelShape(intermediate_size=256, num_heads=4, num_kv_heads=2)  # as Qwen3-Next's
# By the end of a weight's name: embeddings are then of unit size, as after a norm.
_SCALES = {"embed_tokens": 50.0, "q_proj": 8.0, "k_proj": 8.0, "v_proj": 4.0, "o_proj": 4.0}
_MTP: Mapping[str, Any] = MappingProxyType(
    COMMON_SIZES
    | {
        "num_hidden_layers": 2,
        "max_position_embeddings": _SHAPE.max_position,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    }
)


def build_drafted(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a model and its drafter to ``folder``, unless they are there; returns the model's own
    folder, and the engine arguments that start it with the drafter."""
    target, more = _KINDS[kind](folder)
    speculative = {"num_speculative_tokens": NUM_DRAFTS, "method": kind.partition(" ")[0]}
    drafter = folder / "drafter"
    if drafter.exists():
        speculative["model"] = str(drafter)
    return target, {"speculative_config": speculative} | more


def build_states_with_drafts(method: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """As :func:`build_drafted`, of a model with recurrent states."""
    from safetensors.torch import load_file

    target, drafter = _build_states_with_head(folder / "model"), folder / "drafter"
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "ngram":
        speculative["prompt_lookup_max"] = 3
    elif method == "eagle3":
        layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
        _save_eagle3_head(drafter, _WITH_STATES, {"lm_head.weight": lm_head}, eagle_config=layers)
        speculative["model"] = str(drafter)
    args = FAMILIES["qwen3-next"].engine_args | {"speculative_config": speculative}
    # With this, vLLM keeps the state at the end of every block.
    return target, args | {"prefix_cache_retention_interval": None}


def _build_states_with_head(folder: Path) -> Path:
    """Write Qwen3-Next with an MTP head, a copy of its last layer, unless it is there. Both say few
    words, and layers add more to the hidden state than they pass on, so that answers repeat n-grams
    and some drafts are right."""
    import torch
    from safetensors.torch import load_file, save_file

    file = build_family("qwen3-next", folder) / "model.safetensors"
    weights = load_file(file)
    if "mtp.fc.weight" not in weights:
        layer, norm = "model.layers.3.", weights["model.norm.weight"]
        size = len(norm)
        head = {"norm": norm, "pre_fc_norm_hidden": norm, "pre_fc_norm_embedding": norm}
        head["fc"] = torch.eye(size, dtype=torch.bfloat16).repeat(1, 2)  # token and hidden state
        weights |= {f"mtp.{name}.weight": weight.clone() for name, weight in head.items()} | {
            name.replace(layer, "mtp.layers.0."): weight.clone()
            for name, weight in weights.items()
            if name.startswith(layer)
        }
        weights["lm_head.weight"][16:] = 0
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weight.mul_(8)
        _save_config(folder, folder, {"num_nextn_predict_layers": 1})
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def _twin(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The drafter is the model itself: every draft is accepted."""
    target = _build_sharp(folder / "model")
    if not (folder / "drafter").exists():
        (folder / "drafter").symlink_to(target)
    return target, {}


def _eagle(folder: Path) -> tuple[Path, dict[str, Any]]:
    import torch
    from safetensors.torch import load_file, save_file

    target, drafter = _build_sharp(folder / "model"), folder / "drafter"
    if not (drafter / "model.safetensors").exists():
        weights = load_file(target / "model.safetensors")
        layer = "model.layers.0."
        kept = {
            name.removeprefix("model."): weight
            for name, weight in weights.items()
            if name.startswith(layer) and "input_layernorm" not in name
        }
        size = _SHAPE.hidden_size
        take_token = torch.eye(size, 2 * size, dtype=torch.bfloat16)  # and not the hidden state
        _save_config(drafter, target, {"num_hidden_layers": 1})
        save_file(kept | {"fc.weight": take_token}, drafter / "model.safetensors")
    return target, {}


def _eagle3(folder: Path) -> tuple[Path, dict[str, Any]]:
    _save_eagle3_head(folder / "drafter", _DEEP, {})
    return build_tiny_model(folder / "model", _DEEP), {}


def _save_eagle3_head(
    drafter: Path, shape: ModelShape, known: Mapping[str, Any], **config: Any
) -> None:
    """For a model of ``shape``. All weights but the ``known`` are random."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    if (drafter / "model.safetensors").exists():
        return
    size, inner, vocab = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes = {
        "fc": (size, 3 * size),
        "lm_head": (vocab, size),
        "norm": (size,),
        "midlayer.hidden_norm": (size,),
        "midlayer.input_layernorm": (size,),
        "midlayer.post_attention_layernorm": (size,),
        "midlayer.self_attn.q_proj": (queries, 2 * size),
        "midlayer.self_attn.k_proj": (keys, 2 * size),
        "midlayer.self_attn.v_proj": (keys, 2 * size),
        "midlayer.self_attn.o_proj": (size, queries),
        "midlayer.mlp.gate_proj": (inner, size),
        "midlayer.mlp.up_proj": (inner, size),
        "midlayer.mlp.down_proj": (size, inner),
    }
    LlamaConfig(
        vocab_size=vocab,
        draft_vocab_size=vocab,
        hidden_size=size,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        bos_token_id=0,
        eos_token_id=0,
        architectures=["LlamaForCausalLMEagle3"],
        **config,
    ).save_pretrained(drafter)
    generator = torch.Generator().manual_seed(20251122)
    weights = {
        f"{name}.weight": (
            torch.randn(shape, generator=generator) * 0.1 if len(shape) > 1 else torch.ones(shape)
        ).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(weights | dict(known), drafter / "model.safetensors")


def _mtp(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The weights are made up by vLLM: Transformers' own model has no such layer."""
    from transformers import AutoConfig

    target = folder / "model"
    AutoConfig.for_model("glm4_moe", **_MTP).save_pretrained(target)
    more = {"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1}
    _save_config(target, target, more)
    save_tokenizer(target, _SHAPE)
    return target, {"load_format": "dummy"}


def _build_sharp(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    done = folder / "sharp.txt"
    if not done.exists():
        file = build_tiny_model(folder, _SHAPE) / "model.safetensors"
        weights = {
            name: weight * _SCALES.get(name.removesuffix(".weight").rpartition(".")[2], 1.0)
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
        done.write_text("")
    return folder


def _save_config(folder: Path, target: Path, changes: dict[str, Any]) -> None:
    config = json.loads((target / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))


_KINDS: Mapping[str, Callable[[Path], tuple[Path, dict[str, Any]]]] = MappingProxyType(
    {
        "draft_model": _twin,
        "eagle": _eagle,
        "eagle3": _eagle3,
        "mtp of GLM-4.5": _mtp,
    }
)
KINDS = tuple(_KINDS)
