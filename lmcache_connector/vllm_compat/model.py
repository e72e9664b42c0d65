"""The model as vLLM has configured it, read into plain data (:class:`ModelDescription`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.kv_layout.paged_cache import Plane
from lmcache_connector.kv_layout.topology import RankTopology, TopologyError, all_ranks
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.vllm_compat.cpu_attention import CpuAttention, Packing, find_packing
from lmcache_connector.vllm_compat.element_formats import element_formats
from lmcache_connector.vllm_compat.excused import IN_TOKEN_ORDER
from lmcache_connector.vllm_compat.identity import configuration_digests
from lmcache_connector.vllm_compat.support import check_setup, layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True)
class ModelDescription:
    """The model as this connector sees it.

    ``ranks`` and ``geometries`` list the workers of one engine in rank order (TP within PP).
    ``rank``, ``num_kv_heads`` and ``layer_widths`` are those of this process; the latter maps its
    layers' names, in model order, to the bytes of one token and one KV head, and ``formats`` say
    how their elements are stored. ``name`` is the user's. ``block_size`` is in tokens. ``planes``
    say how a block lies in memory where strides do not. ``configuration`` holds digests of all that
    makes the model's KV its own beside the weights, by name, as this process sees it: see
    :func:`configuration_digests`.
    """

    ranks: tuple[RankTopology, ...]
    geometries: tuple[ChunkGeometry, ...]
    rank: int
    block_size: int
    num_kv_heads: int
    layer_widths: dict[str, int]
    formats: tuple[str, ...]
    name: str
    planes: tuple[Plane, ...]
    configuration: dict[str, str]

    @property
    def world_size(self) -> int:
        return len(self.ranks)


def describe_model(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, chunk_size: int | None
) -> ModelDescription:
    """Describe the model to the process that asks.

    ``chunk_size`` is in tokens; ``None``: a chunk is one block. Raises :class:`UnsupportedError`
    with one sentence on what cannot be cached.
    """
    check_setup(vllm_config, kv_cache_config)
    group = kv_cache_config.kv_cache_groups[0]
    widths = _layer_widths(group)
    block_size = group.kv_cache_spec.block_size
    chunk_size = chunk_size or block_size
    if chunk_size % block_size:
        raise UnsupportedError(
            f"chunk_size {chunk_size} is not a multiple of vLLM's block size {block_size}: "
            f"set chunk_size to a multiple, or --block-size to a divisor of {chunk_size}."
        )
    ranks = _ranks(vllm_config)
    spec = layer_specs(group)[group.layer_names[0]]
    packing = _packing(vllm_config, chunk_size, layer_specs(group))
    return ModelDescription(
        ranks=ranks,
        geometries=tuple(
            ChunkGeometry(
                num_tokens=chunk_size,
                layer_start=rank.layer_start,
                layer_widths=_widths_of(rank, len(ranks), widths),
                shards=rank.read_shards,
                num_shards_total=_total_kv_heads(vllm_config),
                dtype=str(spec.dtype).removeprefix("torch."),
            )
            for rank in ranks
        ),
        rank=vllm_config.parallel_config.rank % len(ranks),
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        layer_widths=widths,
        formats=element_formats(group, vllm_config.cache_config.cache_dtype),
        name=vllm_config.model_config.model,
        planes=packing.planes,
        configuration=configuration_digests(vllm_config, kv_cache_config, packing.name),
    )


# -- shapes --------------------------------------------------------------------------------------


def _layer_widths(group: KVCacheGroupSpec) -> dict[str, int]:
    """Content bytes per token and KV head of each layer, in model order."""
    specs = layer_specs(group)
    return {
        name: specs[name].state_content_size_bytes
        for name in sorted(specs, key=extract_layer_index)
    }


def _packing(vllm_config: VllmConfig, chunk_size: int, layers: dict[str, Any]) -> Packing:
    specs = list(layers.values())
    spec = specs[0]
    if not current_platform.is_cpu():
        orders = _own_orders(vllm_config, list(layers))
        return Packing(
            f"{', '.join(orders)} in blocks of {spec.block_size}" if orders else None, ()
        )
    if vllm_config.model_config.use_mla:
        return Packing(f"latents in blocks of {spec.block_size}", ())
    if len({(each.head_size, each.dtype) for each in specs}) > 1:
        raise UnsupportedError(
            "lmcache-connector does not support layers of different head sizes on CPU yet: "
            "start without --kv-transfer-config."
        )
    attention = CpuAttention(
        head_size=spec.head_size,
        dtype=vllm_config.model_config.dtype,
        cache_dtype=vllm_config.cache_config.cache_dtype,
        storage_dtype=spec.dtype,
    )
    return find_packing(attention, spec.block_size, chunk_size)


def _own_orders(vllm_config: VllmConfig, layer_names: list[str]) -> list[str]:
    """Attention backends of these layers that may order a block's bytes in a way of their own.

    vLLM knows a layer's backend once the model is built, in the process that built it.
    """
    layers = vllm_config.compilation_config.static_forward_context
    backends = {layers[name].get_attn_backend().__name__ for name in layer_names if name in layers}
    return sorted(backends - IN_TOKEN_ORDER)


def _ranks(vllm_config: VllmConfig) -> tuple[RankTopology, ...]:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    pp = parallel.pipeline_parallel_size
    layers = [get_pp_indices(model.get_total_num_hidden_layers(), rank, pp) for rank in range(pp)]
    try:
        return all_ranks(
            tp_size=parallel.tensor_parallel_size,
            layer_counts=tuple(end - start for start, end in layers),
            num_kv_heads=_total_kv_heads(vllm_config),
            is_mla=model.use_mla,
        )
    except TopologyError as error:
        raise UnsupportedError(str(error)) from error


def _total_kv_heads(vllm_config: VllmConfig) -> int:
    model = vllm_config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def _widths_of(rank: RankTopology, world_size: int, widths: dict[str, int]) -> tuple[int, ...]:
    """Layer widths of any rank. Those of other ranks are not known here: taken to be ours."""
    if rank.num_layers == len(widths):
        return tuple(widths.values())
    if len(set(widths.values())) > 1 or world_size == 1:
        raise UnsupportedError(
            "lmcache-connector does not support layers of different shapes, or layers without "
            "a KV cache of their own, in this model: start without --kv-transfer-config."
        )
    return (next(iter(widths.values())),) * rank.num_layers
