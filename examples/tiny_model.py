"""A tiny Llama with random weights and a tokenizer, written to disk without a download.

A shape always has the same weights, byte for byte, so processes that build it share chunks.

    python -m examples.tiny_model /tmp/tiny-llama --hidden-size 1024
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_SEED = 20240229
_BYTES_PER_ELEMENT = 2  # bfloat16
_END_OF_TEXT = "<|end|>"
_UNKNOWN = "<|unknown|>"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model. The defaults start quickly and suit tests that only need some KV."""

    num_layers: int = 4
    hidden_size: int = 256
    intermediate_size: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    vocab_size: int = 2048
    max_position: int = 16384

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _BYTES_PER_ELEMENT


# A small model for vLLM's configuration and scheduler; it is never run.
TINY = ModelShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=64,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=64,
    max_position=1024,
)

# Sized for two cores: prefill takes long enough for a hit to show. 6,000 tokens of KV have 49 MB,
# as in two layers of an 8B model.
DEMO_SHAPE = ModelShape(
    num_layers=8,
    hidden_size=512,
    intermediate_size=1536,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
)


# Llama 3.1 8B, for ``load_format="dummy"``.
LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position=131072,
)


def build_tiny_model(
    folder: Path, shape: ModelShape = ModelShape(), *, weights: bool = True
) -> Path:
    """Write configuration, bfloat16 weights and tokenizer to ``folder``, unless they exist.

    Returns ``folder``. A half-written folder is written again. Without ``weights``, vLLM has to be
    told ``load_format="dummy"``.
    """
    done = folder / "shape.txt"
    if done.is_file() and done.read_text() == repr(shape):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder, shape)
    _save_model(folder, shape, weights=weights)
    done.write_text(repr(shape))
    return folder


def _save_model(folder: Path, shape: ModelShape, *, weights: bool) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # for one small file
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    if not weights:
        config.save_pretrained(folder)
        return
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def save_tokenizer(folder: Path, shape: ModelShape) -> None:
    """One token per word: ``w17`` is token 17, and so on from ``w2``. Any other word is token 1.

    So a prompt has as many tokens as words.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {_END_OF_TEXT: 0, _UNKNOWN: 1}
    words |= {f"w{token}": token for token in range(2, shape.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_END_OF_TEXT,
        eos_token=_END_OF_TEXT,
        unk_token=_UNKNOWN,
        model_max_length=shape.max_position,
        chat_template=_CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random Llama to a folder.")
    parser.add_argument("folder", type=Path, help="where to; made if missing")
    for field in fields(ModelShape):
        flag = "--" + field.name.replace("_", "-")
        default = getattr(DEMO_SHAPE, field.name)
        parser.add_argument(flag, type=int, default=default, help=f"default {default}")
    arguments = vars(parser.parse_args())
    folder = build_tiny_model(arguments.pop("folder"), ModelShape(**arguments))
    print(folder, asdict(ModelShape(**arguments)))


if __name__ == "__main__":
    main()
