"""Settings that cannot work stop the start with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.instance import InstanceError, StartInstance, VllmInstance
from tests.support.engines.settings import kv_transfer
from tests.support.engines.tiny_model import ModelShape, build_tiny_model


def refusal(instance: VllmInstance) -> str:
    with pytest.raises(InstanceError) as error, instance:
        pass
    return str(error.value)


def test_a_chunk_size_that_is_no_multiple_of_the_block_size(start: StartInstance) -> None:
    message = refusal(start(kv_transfer(chunk_size=200)))
    assert "chunk_size 200 is not a multiple of vLLM's block size 128" in message


def test_unknown_keys_and_wrong_values_are_listed_together(start: StartInstance) -> None:
    message = refusal(start(kv_transfer(cpu_gb=3, chunk_size="big")))
    assert "did you mean 'cpu_gib'" in message
    assert "'chunk_size': input should be a valid integer" in message


def test_a_model_with_several_kv_cache_groups(start: StartInstance, tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig

    folder = build_tiny_model(tmp_path / "hybrid", ModelShape())
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 2048}
    Gemma3TextConfig(
        **sizes,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=256,
        layer_types=["full_attention", "sliding_attention"] * 2,
        architectures=["Gemma3ForCausalLM"],
    ).save_pretrained(folder)
    message = refusal(start(folder=folder, load_format="dummy"))
    assert "does not support models with several KV cache groups yet" in message
    assert "--disable-hybrid-kv-cache-manager" in message


def test_speculation_with_a_draft_model(start: StartInstance, tiny_model: Path) -> None:
    draft = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 2}
    message = refusal(start(speculative_config=draft))
    assert "lmcache-connector does not support speculative decoding with" in message
    assert "use the ngram method or none" in message
