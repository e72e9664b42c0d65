"""vLLM's KV cache groups as parts of a model: see :mod:`..kv_parts.part`."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from lmcache_connector.audit.compare import DTYPES, OPAQUE
from lmcache_connector.kv_layout.topology import GroupLayers, PartLayout, RankTopology, all_ranks
from lmcache_connector.kv_parts.part import MAX_PARTS, Part, Rule
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.vllm_compat.cpu_attention import CpuAttention, Packing, find_packing
from lmcache_connector.vllm_compat.drafter import find_drafter
from lmcache_connector.vllm_compat.identity_tables import IN_TOKEN_ORDER
from lmcache_connector.vllm_compat.support import (
    first_spec,
    kept_groups,
    layer_specs,
    rule_of,
    unsupported,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_RULES = tuple(Rule)
# vLLM stores these as bytes. Other names are plain dtypes, or pack elements with their scales.
_BYTES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of this rank. ``shape`` is shared by the layers of a part."""

    name: str
    group: int
    spec: Any
    rule: Rule
    span: int
    shape: Hashable

    @property
    def order(self) -> tuple[int, str]:
        """Position in the model."""
        return extract_layer_index(self.name), self.name

    @property
    def width(self) -> int:
        """Bytes of one token and one KV head, or of one state."""
        return int(self.spec.state_content_size_bytes)


def block_size_of(kv_cache_config: KVCacheConfig) -> int:
    """The smallest number of tokens that fills whole blocks in every KV cache group. Taken from the
    groups, since the cache configuration may differ in the scheduler's process.
    """
    return math.lcm(*(g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups))


def find_parts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_size: int
) -> tuple[tuple[PartLayout, ...], tuple[str | None, ...]]:
    """The parts, and for each the name of the order of bytes inside a block. The order of parts
    depends only on the model, not on how vLLM groups layers. Raises :class:`UnsupportedError`.
    """
    by_part: dict[Hashable, list[_Layer]] = {}
    for layer in _layers(kv_cache_config):
        key = (layer.rule, layer.span, layer.spec.block_size, layer.shape)
        by_part.setdefault(key, []).append(layer)
    parts = [sorted(layers, key=lambda layer: layer.order) for layers in by_part.values()]
    parts.sort(key=lambda layers: (_RULES.index(layers[0].rule), layers[0].order))
    if len(parts) > min(MAX_PARTS, 16):
        raise unsupported(f"KV caches of {len(parts)} different shapes")
    if len(parts) > 1 and vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise unsupported(
            "pipeline parallelism with models of several kinds of KV", "use one stage"
        )
    packings = [_packing(vllm_config, chunk_size, layers) for layers in parts]
    found = tuple(
        _part(vllm_config, chunk_size, layers, packing)
        for layers, packing in zip(parts, packings, strict=True)
    )
    return found, tuple(packing.name for packing in packings)


def _layers(kv_cache_config: KVCacheConfig) -> list[_Layer]:
    found = []
    for number, group in kept_groups(kv_cache_config):
        # Of layers that share a block table, the scheduler's process sees only the first, which
        # determines the same parts. The ranks report layer widths: see RankStart.
        first = first_spec(group)
        shape = (first.num_heads, first.state_content_size_bytes, str(_dtype(first)))
        for name, spec in layer_specs(group).items():
            rule, span = rule_of(name, spec)
            if (rule, span, spec.num_heads) != (*rule_of(name, first), first.num_heads):
                raise unsupported(
                    f"layer {name} yet, which has another number of KV heads or another rule than "
                    "others in its KV cache group"
                )
            found.append(_Layer(name, number, spec, rule, span, shape))
    return found


def _dtype(spec: Any) -> Any:
    return getattr(spec, "dtype", None)  # a state has several dtypes, and is stored as bytes


def _part(
    vllm_config: VllmConfig, chunk_size: int, layers: list[_Layer], packing: Packing
) -> PartLayout:
    first = layers[0]
    groups = tuple(sorted({layer.group for layer in layers}))
    is_state = first.rule is Rule.STATE
    num_heads = _total_heads(vllm_config, first)
    ranks = all_ranks(
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        layer_counts=_layer_counts(vllm_config, len(layers)),
        num_kv_heads=num_heads,
    )
    if ranks[vllm_config.parallel_config.rank % len(ranks)].num_layers != len(layers):
        raise unsupported(
            "layers without a KV cache of their own in several pipeline stages", "use one stage"
        )
    widths = tuple(layer.width for layer in layers)
    cache_dtype = vllm_config.cache_config.cache_dtype
    return PartLayout(
        part=Part(first.rule, groups, first.spec.block_size, first.span),
        groups=tuple(_in_group(layers, group) for group in groups),
        geometries=tuple(
            ChunkGeometry(
                num_tokens=1 if is_state else chunk_size,
                layer_start=rank.layer_start,
                layer_widths=_widths_of(rank, widths),
                shards=rank.shards,
                num_shards_total=num_heads,
                dtype=_dtype_name(layers),
            )
            for rank in ranks
        ),
        num_kv_heads=1 if is_state else first.spec.num_kv_heads,
        planes=packing.planes,
        mixed_tokens=packing.mixed_tokens,
        formats=tuple(_element_format(layer.spec, cache_dtype) for layer in layers),
    )


def _dtype_name(layers: list[_Layer]) -> str:
    """The dtype of these layers' values; uint8 if there are several."""
    names = {str(_dtype(layer.spec)).removeprefix("torch.") for layer in layers}
    return names.pop() if len(names) == 1 and layers[0].rule is not Rule.STATE else "uint8"


def _in_group(layers: list[_Layer], group: int) -> GroupLayers:
    found = [(layer.name, i) for i, layer in enumerate(layers) if layer.group == group]
    names, positions = zip(*found, strict=True)
    return GroupLayers(names, positions)


def _element_format(spec: Any, cache_dtype: str) -> str:
    """Element format, as named in :mod:`..audit.compare`. ``cache_dtype``: as vLLM resolved it."""
    name = str(_dtype(spec)).removeprefix("torch.")
    if isinstance(spec, MLAAttentionSpec):  # has its own cache dtype; an index has none
        cache_dtype = spec.cache_dtype_str or OPAQUE
    if name in ("uint8", "int8"):
        return _BYTES.get(cache_dtype, OPAQUE)
    return name if name in DTYPES else OPAQUE


# -- ranks ---------------------------------------------------------------------------------------


def _layer_counts(vllm_config: VllmConfig, num_layers: int) -> tuple[int, ...]:
    """Layers with KV on each pipeline rank; this one has ``num_layers``."""
    pp = vllm_config.parallel_config.pipeline_parallel_size
    if pp == 1:
        return (num_layers,)
    total = vllm_config.model_config.get_total_num_hidden_layers()
    stages = [get_pp_indices(total, rank, pp) for rank in range(pp)]
    return tuple(end - start for start, end in stages)


def _total_heads(vllm_config: VllmConfig, layer: _Layer) -> int:
    """The model's KV heads in such a layer, without replicas. For a state, each rank's piece is one
    head.
    """
    spec, model = layer.spec, vllm_config.model_config
    tp: int = vllm_config.parallel_config.tensor_parallel_size
    if layer.rule is Rule.STATE:
        return 1 if spec.tp_replicated else tp
    if isinstance(spec, MLAAttentionSpec):
        return 1
    if tp == 1:
        return int(spec.num_kv_heads)
    named: tuple[int | None, ...] = (
        model.get_total_num_kv_heads(),
        # Gemma 4's layers with full attention have fewer.
        getattr(model.hf_text_config, "num_global_key_value_heads", None),
    )
    fitting = [n for n in named if n is not None and max(1, n // tp) == spec.num_kv_heads][:1]
    if (drafter := find_drafter(vllm_config)) is not None:
        drafted = drafter.model.get_total_num_kv_heads()
        fitting += [drafted] if max(1, drafted // tp) == spec.num_kv_heads else []
    if len(set(fitting)) == 1:
        (total,) = set(fitting)
        if total % tp and tp % total:
            raise unsupported(
                f"{tp} tensor-parallel ranks for the {total} KV heads of layer {layer.name}",
                "use a number of ranks that divides the number of heads, or is a multiple of it",
            )
        return total
    if not fitting and spec.num_kv_heads > 1:
        return int(spec.num_kv_heads) * tp
    raise unsupported(
        f"layer {layer.name}, because vLLM does not report how many ranks share a KV head",
        "use one rank",
    )


def _widths_of(rank: RankTopology, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Layer widths of ``rank``, assumed equal to ours (``widths``)."""
    if rank.num_layers == len(widths):
        return widths
    if len(set(widths)) > 1:
        raise unsupported("layers of different shapes in several pipeline stages", "use one stage")
    return (widths[0],) * rank.num_layers


# -- the order of bytes inside a block -----------------------------------------------------------


def _packing(vllm_config: VllmConfig, chunk_size: int, layers: list[_Layer]) -> Packing:
    spec = layers[0].spec
    if layers[0].rule is Rule.STATE:
        return Packing(None, ())
    if not current_platform.is_cpu():
        orders = _own_orders(vllm_config, [layer.name for layer in layers])
        return Packing(
            f"{', '.join(orders)} in blocks of {spec.block_size}" if orders else None,
            (),
            spec.block_size if orders else 1,
        )
    if isinstance(spec, MLAAttentionSpec):
        return Packing(f"latents in blocks of {spec.block_size}", (), spec.block_size)
    if len({(layer.spec.head_size, layer.spec.dtype) for layer in layers}) > 1:
        raise unsupported("layers of different head sizes that share their blocks on CPU yet")
    attention = CpuAttention(
        head_size=spec.head_size,
        dtype=vllm_config.model_config.dtype,
        cache_dtype=vllm_config.cache_config.cache_dtype,
        storage_dtype=spec.dtype,
    )
    return find_packing(attention, spec.block_size, chunk_size)


def _own_orders(vllm_config: VllmConfig, layer_names: list[str]) -> list[str]:
    """Attention backends of these layers that may have their own order of bytes in a block. Known
    only in the process that built the model.
    """
    layers = vllm_config.compilation_config.static_forward_context
    backends = {layers[name].get_attn_backend().__name__ for name in layer_names if name in layers}
    return sorted(backends - IN_TOKEN_ORDER)
