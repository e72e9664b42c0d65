"""LoRA adapters for the tiny model, and a tiny model that reads pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.tiny_model import ModelShape

_RANK = 8
_IMAGE_TOKEN = "<image>"
IMAGE_TOKENS = 320
"""Placeholder tokens at the start of a prompt with a picture: one chunk of 256, and some more."""


def build_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of random weights for Q, K and V of all layers, as PEFT writes them."""
    import torch
    from safetensors.torch import save_file

    shape = ModelShape()
    generator = torch.Generator().manual_seed(seed)
    kv_size = shape.num_kv_heads * shape.head_dim
    sizes = {"q_proj": shape.num_heads * shape.head_dim, "k_proj": kv_size, "v_proj": kv_size}
    tensors = {}
    for layer in range(shape.num_layers):
        for name, size in sizes.items():
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, lines, rows in (("A", _RANK, shape.hidden_size), ("B", size, _RANK)):
                weight = torch.randn(lines, rows, generator=generator)
                tensors[f"{base}.lora_{part}.weight"] = weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": _RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(sizes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def build_seeing_model(folder: Path) -> Path:
    """A BLIP-2 of random weights: 56 x 56 pixels become ``IMAGE_TOKENS`` tokens of an OPT."""
    import torch
    from transformers import Blip2ForConditionalGeneration

    config = _seeing_config()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Blip2ForConditionalGeneration(config).to(torch.bfloat16)
        torch.nn.init.normal_(model.query_tokens)
        for name, weight in model.named_parameters():
            # Otherwise all pictures would look alike to the model.
            if weight.dim() > 1 and any(p in name for p in ("vision", "qformer", "projection")):
                torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    _save_processor(folder)
    return folder


def _seeing_config() -> Any:
    from transformers import Blip2Config, Blip2QFormerConfig, Blip2VisionConfig, OPTConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    vision = Blip2VisionConfig(**sizes, num_attention_heads=2, image_size=56, patch_size=14)
    qformer = Blip2QFormerConfig(
        **sizes, num_attention_heads=2, vocab_size=64, encoder_hidden_size=64
    )
    text = OPTConfig(
        vocab_size=2048,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=qformer.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=2,
    )


def _save_processor(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import Blip2Processor, PreTrainedTokenizerFast
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    words = {"<|end|>": 0, "<|unknown|>": 1, _IMAGE_TOKEN: 2}
    words |= {f"w{token}": token for token in range(3, 2048)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|end|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        pad_token="<|end|>",
        model_max_length=4096,
        additional_special_tokens=[_IMAGE_TOKEN],
    )
    pictures = BlipImageProcessorPil(size={"height": 56, "width": 56})
    processor = Blip2Processor(
        image_processor=pictures, tokenizer=fast, num_query_tokens=IMAGE_TOKENS
    )
    processor.save_pretrained(folder)
