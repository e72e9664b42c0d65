"""Every field of vLLM's configuration is excused with a reason, or part of the key. Versions that
compute the same KV have the same keys, and those of 0.32 stay what they are.

Fields are changed one by one on a real configuration, to a value that vLLM itself would not take:
what counts is whether the change can be told.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.models as vllm_models
from vllm.config import VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.config.ec_transfer import ECTransferConfig
from vllm.config.lora import LoRAConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.model_executor.models.registry import _MULTIMODAL_MODELS, _TEXT_GENERATION_MODELS
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from examples.tiny_model import TINY, build_tiny_model
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.vllm_compat.identity import configuration_digests, fingerprint
from lmcache_connector.vllm_compat.identity_tables import (
    ANY,
    CONDITIONALLY_IGNORED,
    INDEPENDENT_OF_LENGTH,
    NOT_PART_OF_IDENTITY,
    OTHERS_HAVE,
    OTHERS_LACK,
    same_form,
)
from tests.support.vllm_configs import full_attention, kv_cache, vllm_config

# A value that no field has.
OTHER = "another value"
# Fields that are excused for some values only, each with such a value.
OTHERS: dict[str, Any] = {
    "max_model_len": 512,
    "original_max_model_len": 512,
    "load_format": "safetensors",
    "speculative_config": SimpleNamespace(method="ngram"),  # of a drafter without KV
}


@functools.cache
def config() -> VllmConfig:
    """With all parts. Built at collection, because its fields are the parameters of tests."""
    folder = build_tiny_model(Path(tempfile.mkdtemp()) / "tiny", TINY)
    found = vllm_config(folder)
    found.lora_config = LoRAConfig()
    found.model_config.multimodal_config = MultiModalConfig()
    found.ec_transfer_config = ECTransferConfig()
    found.diffusion_config = DiffusionConfig(canvas_length=8)
    return found


def parts() -> list[tuple[str, ...]]:
    """Paths of all configurations inside vLLM's, the outermost first, that are not excused."""
    found: list[tuple[str, ...]] = [()]
    for path in found:
        owner = functools.reduce(getattr, path, config())
        for name, value in vars(owner).items():
            is_config = dataclasses.is_dataclass(value) and type(value).__module__.startswith(
                "vllm"
            )
            if is_config and name not in NOT_PART_OF_IDENTITY.get(type(owner).__name__, {}):
                found.append((*path, name))
    return found


def fields() -> list[tuple[str, ...]]:
    """Paths of all fields of these parts, except cached properties."""
    known = parts()
    return [
        (*path, name)
        for path in known
        for owner in [functools.reduce(getattr, path, config())]
        for name in sorted(vars(owner))
        if (*path, name) not in known
        and not isinstance(getattr(type(owner), name, None), functools.cached_property)
    ]


def changed(path: tuple[str, ...], owner: Any) -> Any:
    """A copy of ``owner`` with another value at ``path``."""
    twin = copy.copy(owner)
    value = (
        changed(path[1:], getattr(owner, path[0])) if len(path) > 1 else OTHERS.get(path[0], OTHER)
    )
    object.__setattr__(twin, path[0], value)
    return twin


def digests(found: Any, cache: KVCacheConfig | None = None) -> dict[str, str]:
    return configuration_digests(found, cache or kv_cache(), [None])


@functools.cache
def unchanged() -> dict[str, str]:
    return digests(config())


@pytest.mark.parametrize("path", fields(), ids=".".join)
def test_a_field_is_excused_with_a_reason_or_part_of_the_key(path: tuple[str, ...]) -> None:
    owners = [
        type(functools.reduce(getattr, path[:depth], config())).__name__
        for depth in range(len(path))
    ]
    is_ignored = any(
        path[-1] in table.get(owners[-1], {})
        for table in (NOT_PART_OF_IDENTITY, CONDITIONALLY_IGNORED)
    ) or any(
        OTHERS_HAVE.get(owner, {}).get(name) is ANY
        for owner, name in zip(owners, path, strict=True)
    )
    assert (digests(changed(path, config())) == unchanged()) == is_ignored, path


@pytest.mark.parametrize("field", dataclasses.fields(FullAttentionSpec), ids=lambda f: f.name)
def test_a_field_of_a_kv_cache_spec_is_excused_or_part_of_the_key(field: Any) -> None:
    spec = full_attention()
    if field.name in ("block_size", "dtype", "head_size", "num_kv_heads"):
        other: Any = {"block_size": 32, "head_size": 64, "num_kv_heads": 1}.get(field.name, OTHER)
    else:
        other = 7
    twin = copy.copy(spec)
    object.__setattr__(twin, field.name, other)
    is_same = digests(config(), kv_cache(twin)) == digests(config(), kv_cache(spec))
    assert is_same == (field.name in NOT_PART_OF_IDENTITY["KVCacheSpec"])


# -- max_model_len -------------------------------------------------------------------------------

# Checked by hand: the length only sizes buffers, or bounds an image's tokens in a test prompt.
READ = {
    "deepseek_v2.py": "of the indexer's buffers",
    "gemma3_mm.py": "get_encoder_cudagraph_budget_range",
    "qwen2_vl.py": "get_encoder_cudagraph_budget_range, get_max_frames_per_video",
    "qwen2_5_vl.py": "get_encoder_cudagraph_budget_range, get_max_frames_per_video",
    "qwen3_vl.py": "get_encoder_cudagraph_budget_range, get_max_frames_per_video",
}


@pytest.mark.parametrize("architecture", sorted(INDEPENDENT_OF_LENGTH))
def test_models_said_not_to_use_their_length_do_not(architecture: str) -> None:
    module, _ = (_TEXT_GENERATION_MODELS | _MULTIMODAL_MODELS)[architecture]
    (folder,) = vllm_models.__path__
    source = Path(folder) / f"{module.split('.')[-1]}.py"
    assert "max_model_len" not in source.read_text() or source.name in READ


def test_rotary_embeddings_that_use_the_length_are_known() -> None:
    folder = Path(vllm_models.__path__[0]).parent / "layers" / "rotary_embedding"
    using = [file.name for file in folder.glob("*.py") if "max_model_len" in file.read_text()]
    assert using == ["phi3_long_rope_scaled_rope.py"]


# -- between versions ------------------------------------------------------------------------------

# Of the tiny model, in every version of vLLM that this release names. A change of these bytes is a
# change of format: nothing that was stored before is ever found again.
FINGERPRINT = "8747e91e399a5c04caec202b2f06b6c2dd2c34b5cc9d287ecffb2bdf5e7a1fe9"
CHUNK_KEY = "4e892625c6ed510f300342558c44ba434466d0be3546419572c16e4551ee70b1"


def first_key(configuration: dict[str, str]) -> str:
    root = {"namespace": "default", "weights": "w", "configuration": configuration}
    return PrefixHasher(root, 128, None).root_key({}).hex()


@pytest.mark.parametrize("has_bf16", [False, True])
def test_keys_are_what_they_were(
    model: Path, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    """On CPUs of every kind: vLLM sets a field and a variable where they have AVX-512 BF16."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "")  # remembered, so that it is set back
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    found = configuration_digests(vllm_config(model), kv_cache(), ["a packing"])
    assert (fingerprint(found), first_key(found)) == (FINGERPRINT, CHUNK_KEY)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("vllm.config.cache.CacheConfig", "user_specified_mamba_block_size", False),
        ("vllm.v1.kv_cache_interface.FullAttentionSpec", "is_draft", False),
        ("vllm.v1.kv_cache_interface.SlidingWindowSpec", "is_draft", False),
        ("vllm.model_executor.models.registry._ModelInfo", "supports_lora", True),
    ],
)
def test_a_field_that_changes_nothing_is_left_out(kind: str, field: str, value: object) -> None:
    assert same_form([{"is": kind, field: value}]) == same_form([{"is": kind}])


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("vllm.config.cache.CacheConfig", "user_specified_mamba_block_size", True),
        ("vllm.config.cache.CacheConfig", "user_specified_mamba_block_size", 0),
        ("vllm.v1.kv_cache_interface.FullAttentionSpec", "is_draft", True),
        ("somebodys.CacheConfig", "user_specified_mamba_block_size", False),
        ("vllm.config.cache.CacheConfig", "something_new", False),
    ],
)
def test_any_other_field_keeps_versions_apart(kind: str, field: str, value: object) -> None:
    form = {"is": kind, field: value}
    assert same_form(form) == form


def test_the_tables_do_not_contradict_each_other() -> None:
    for name, fields in OTHERS_LACK.items():
        assert not fields.keys() & OTHERS_HAVE.get(name, {}).keys()
