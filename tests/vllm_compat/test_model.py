"""What is read off vLLM's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import JambaConfig, LlamaConfig
from vllm.config import ModelConfig, MultiModalConfig, VllmConfig
from vllm.model_executor.models.jamba import JambaForCausalLM
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_groups_uniform_page_size,
    unify_kv_cache_spec_page_size,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.vllm_compat import identity
from lmcache_connector.vllm_compat.model import ModelDescription, describe_model
from tests.support.vllm_configs import (
    BLOCK_SIZE,
    LAYERS,
    full_attention,
    kv_cache,
    latents_with_index,
    vllm_config,
)


def describe(
    config: VllmConfig, cache: KVCacheConfig, chunk_size: int | None = 128
) -> ModelDescription:
    return describe_model(config, cache, chunk_size=chunk_size)


def test_a_tiny_llama_is_described(model: Path) -> None:
    found = describe(vllm_config(model), kv_cache(), chunk_size=64)
    assert found.world_size == 1
    (layout,) = found.parts
    assert layout.part.block_size == BLOCK_SIZE
    assert layout.groups[0].names == tuple(LAYERS)
    geometry = layout.geometries[0]
    assert geometry.layer_widths == (2 * 32 * 2,) * 2
    assert geometry.num_tokens == 64
    assert geometry.chunk_bytes == 64 * 2 * 2 * 2 * 32 * 2  # layers, heads, K and V, bfloat16


def test_two_ranks_share_the_heads_and_the_identity(model: Path) -> None:
    one = describe(vllm_config(model), kv_cache())
    two = describe(vllm_config(model, tensor_parallel_size=2), kv_cache(full_attention(1)))
    assert two.world_size == 2
    shards = [tuple(geometry.shards) for geometry in two.parts[0].geometries]
    assert [shard for rank in shards for shard in rank] == list(one.parts[0].geometries[0].shards)
    assert two.configuration == one.configuration, "keys do not depend on tensor parallelism"


@pytest.mark.parametrize(("heads", "ranks"), [(3, 4), (6, 4), (3, 2)])
def test_heads_that_ranks_cannot_share_evenly_are_refused(
    tmp_path: Path, heads: int, ranks: int
) -> None:
    shape = {"hidden_size": 384, "num_attention_heads": 12, "num_key_value_heads": heads}
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    config = vllm_config(tmp_path, tensor_parallel_size=ranks)
    said = f"{ranks} tensor-parallel ranks for the {heads} KV heads of layer .*: use a number"
    with pytest.raises(UnsupportedError, match=said):
        describe(config, kv_cache(full_attention(1)))


def test_configurations_of_stages_add_up_to_that_of_the_whole_model(model: Path) -> None:
    """One has full attention, the other a window: neither contradicts the other."""
    full = full_attention()
    windowed = replace(full, sliding_window=64)
    mixed = UniformTypeKVCacheSpecs(BLOCK_SIZE, dict(zip(LAYERS, (full, windowed), strict=True)))
    config = vllm_config(model)
    whole = describe(config, kv_cache(mixed)).configuration
    stages = [describe(config, kv_cache(spec)).configuration for spec in (full, windowed)]
    assert stages[0] != stages[1]
    assert stages[0] | stages[1] == stages[1] | stages[0] == whole


def test_inputs_that_a_role_accepts_are_not_part_of_the_identity(model: Path) -> None:
    """vLLM derives both from the kv_role: a prefill and a decode instance differ in them."""
    config = vllm_config(model)
    config.model_config.multimodal_config = found = MultiModalConfig()
    producer = describe(config, kv_cache()).configuration
    found.enable_mm_embeds = found.allow_missing_mm_embeddings = True
    assert describe(config, kv_cache()).configuration == producer


# -- parts -----------------------------------------------------------------------------------------


SHAPE = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16, "block_size": BLOCK_SIZE}


def window(span: int = 64, **sizes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(sliding_window=span, **SHAPE | sizes)


def full(**sizes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**SHAPE | sizes)


def grouped(specs: Sequence[Any]) -> KVCacheConfig:
    """Layers with these specs in model order, as vLLM groups them."""
    named = {f"model.layers.{i}.self_attn.attn": spec for i, spec in enumerate(specs)}
    groups = _get_kv_cache_groups_uniform_page_size(unify_kv_cache_spec_page_size(named))
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def described(model: Path, cache: KVCacheConfig, **parallel: Any) -> ModelDescription:
    return describe_model(vllm_config(model, **parallel), cache, chunk_size=None)


def positions(found: ModelDescription, part: int) -> list[list[int]]:
    """Of the layers of a part in the model, group by group."""
    return [[int(name.split(".")[2]) for name in group.names] for group in found.parts[part].groups]


def test_windows_in_many_groups_are_one_part(model: Path) -> None:
    """Gemma 3: five layers with a window, then one without. vLLM makes six groups of the twelve."""
    found = described(model, grouped(([window()] * 5 + [full()]) * 2))
    prefix, windows = (layout.part for layout in found.parts)
    assert prefix.rule is Rule.PREFIX
    assert windows.rule is Rule.WINDOW
    assert windows.span == 64
    assert sorted((*prefix.groups, *windows.groups)) == list(range(6))
    assert positions(found, 0) == [[5, 11]]
    assert positions(found, 1) == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10]]
    layout = found.parts[1]
    assert [group.positions for group in layout.groups] == [(0, 5), (1, 6), (2, 7), (3, 8), (4, 9)]
    assert layout.geometries[0].layer_widths == (2 * 32 * 2,) * 10
    assert layout.geometries[0].num_tokens == 128


def test_the_window_is_part_of_the_identity(model: Path) -> None:
    one = described(model, grouped([window(64), full()]))
    other = described(model, grouped([window(128), full()]))
    assert one.configuration != other.configuration


def test_what_drafts_read_again_belongs_to_the_window(model: Path) -> None:
    (layout,) = described(model, kv_cache(window(96, extra_retained_tokens=3))).parts
    assert layout.part.span == 99


def test_heads_and_blocks_of_other_sizes(model: Path) -> None:
    """Gemma 4: with a window a token takes half the bytes, so a block holds twice as many."""
    found = described(model, grouped([window(), full(head_size=64)]))
    prefix, windows = found.parts
    assert (prefix.part.block_size, windows.part.block_size) == (16, 32)
    assert (prefix.geometries[0].layer_widths, windows.geometries[0].layer_widths) == (
        (256,),
        (128,),
    )
    assert prefix.planes != windows.planes, "CPU attention packs heads of other sizes in other ways"


def state(**sizes: Any) -> MambaSpec:
    return MambaSpec(
        **{
            "block_size": BLOCK_SIZE,
            "shapes": ((3, 64), (2, 8, 8)),
            "dtypes": (torch.bfloat16, torch.float32),
            "mamba_cache_mode": "align",
            "page_size_padded": full().page_size_bytes,
        }
        | sizes
    )


def test_a_state_is_one_snapshot_of_bytes(model: Path) -> None:
    found = described(model, grouped([state(), state(), full()]))
    prefix, states = found.parts
    assert (prefix.part.rule, states.part.rule) == (Rule.PREFIX, Rule.STATE)
    geometry = states.geometries[0]
    assert (geometry.num_tokens, geometry.layer_widths) == (1, (3 * 64 * 2 + 2 * 8 * 8 * 4,) * 2)


def test_the_states_of_jamba_are_snapshots(model: Path, tmp_path: Path) -> None:
    """By vLLM's description; its CPU build lacks the scan of Mamba-1."""
    JambaConfig(hidden_size=64, architectures=["JambaForCausalLM"]).save_pretrained(tmp_path)
    jamba = vllm_config(tmp_path)
    jamba.cache_config.mamba_ssm_cache_dtype = "float32"  # as vLLM sets it on some CPUs
    shapes = JambaForCausalLM.get_mamba_state_shape_from_config(jamba)
    dtypes = JambaForCausalLM.get_mamba_state_dtype_from_config(jamba)
    mamba_1 = state(shapes=shapes, dtypes=dtypes, page_size_padded=None)
    attention = full(block_size=4 * BLOCK_SIZE)
    found = described(model, grouped([mamba_1, attention]))
    assert [layout.part.rule for layout in found.parts] == [Rule.PREFIX, Rule.STATE]
    (width,) = found.parts[1].geometries[0].layer_widths
    assert width == 3 * 128 * 2 + 128 * 16 * 4


@pytest.mark.parametrize(
    "form",
    [
        {"shapes": ((5, 64), (2, 8, 8))},  # two more tokens of the convolution, for as many drafts
        {"dtypes": (torch.bfloat16, torch.bfloat16)},  # --mamba-ssm-cache-dtype
    ],
)
def test_states_of_other_forms_have_other_keys(model: Path, form: dict[str, Any]) -> None:
    one, other = (
        described(model, grouped([state(**each), full()])).configuration for each in ({}, form)
    )
    assert one != other


def test_states_of_another_order_have_other_keys(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If both dimensions of a state are equal, its shape does not show their order."""
    found = {}
    for order in ("SD", "DS"):
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", order)
        found[order] = [
            described(model, grouped(specs)).configuration
            for specs in ([state(shapes=((8, 8), (2, 8, 8))), full()], [full()])
        ]
    assert found["SD"][0] != found["DS"][0]
    assert found["SD"][1] == found["DS"][1]


@pytest.mark.parametrize("attends_both_ways", [False, True])
def test_keys_of_pictures_that_runners_see_differently_differ(
    model: Path, monkeypatch: pytest.MonkeyPatch, attends_both_ways: bool
) -> None:
    config = vllm_config(model)
    monkeypatch.setattr(ModelConfig, "is_mm_prefix_lm", attends_both_ways)
    found = []
    for is_v2 in (False, True):
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", is_v2)
        found.append(describe(config, kv_cache()).configuration)
    assert (found[0] != found[1]) is attends_both_ways


def test_a_rank_s_piece_of_a_state_is_its_own(model: Path) -> None:
    one = described(model, grouped([state(), full()]))
    two = described(model, grouped([state(), full(num_kv_heads=1)]), tensor_parallel_size=2)
    assert [geometry.shards for geometry in two.parts[1].geometries] == [(0,), (1,)]
    assert two.owners.numbers == [1, 1]
    assert one.configuration != two.configuration, "pieces of two ranks fit no single rank"


def test_states_that_are_not_kept_are_refused(model: Path) -> None:
    with pytest.raises(UnsupportedError, match="--mamba-cache-mode align"):
        described(model, grouped([state(mamba_cache_mode="none"), full()]))


def test_several_stages_of_several_parts_are_refused(model: Path) -> None:
    with pytest.raises(UnsupportedError, match="pipeline parallelism"):
        described(model, grouped([window(), full()]), pipeline_parallel_size=2)


def test_stages_with_layers_that_keep_no_kv_are_refused(model: Path) -> None:
    """A stage does not know how many layers with a KV cache the other stages have."""
    with pytest.raises(UnsupportedError, match="layers without a KV cache of their own"):
        described(model, kv_cache(full_attention()), pipeline_parallel_size=2)


def test_an_index_beside_the_latents_is_part_of_them(model: Path) -> None:
    (layout,) = described(model, latents_with_index()).parts
    (group,) = layout.groups
    assert group.names == tuple(
        f"model.layers.{i}.self_attn.{name}"
        for i in range(2)
        for name in ("indexer.k_cache", "mla_attn")
    )
    (geometry,) = layout.geometries
    assert geometry.layer_widths == (132, 1152, 132, 1152)
    assert geometry.dtype == "uint8"
    assert layout.formats == ("opaque", "bfloat16", "opaque", "bfloat16")


def test_the_schedulers_process_finds_the_same_part(model: Path) -> None:
    """The ranks tell it how wide the layers are: see RankStart."""
    (layout,) = described(model, latents_with_index("scheduler")).parts
    (ranks_own,) = described(model, latents_with_index()).parts
    assert layout.part == ranks_own.part
    assert [group.names for group in layout.groups] == [g.names for g in ranks_own.groups]


def test_a_model_of_one_part_shares_no_root_with_one_of_several(model: Path) -> None:
    """Even if all else is alike: their keys name values of other geometries."""
    config = vllm_config(model)
    roots = [
        identity.configuration_digests(config, kv_cache(), packings)
        for packings in ([None], [None, None], ["a"], ["a", "a"], ["a", None])
    ]
    assert len({identity.fingerprint(root) for root in roots}) == len(roots)
