"""The model as vLLM has configured it, read into plain data (:class:`ModelDescription`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.keys.weights_digest import config_digest, directory_digest
from lmcache_connector.kv_layout.paged_cache import Plane
from lmcache_connector.kv_layout.topology import RankTopology, TopologyError, all_ranks
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.vllm_compat.cpu_attention import CpuAttention, Packing, find_packing
from lmcache_connector.vllm_compat.element_formats import element_formats
from lmcache_connector.vllm_compat.support import check_setup, layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelDescription:
    """The model as this connector sees it.

    ``ranks`` and ``geometries`` list the workers of one engine in rank order (TP within PP).
    ``rank``, ``num_kv_heads`` and ``layer_widths`` are those of this process; the latter maps its
    layers' names, in model order, to the bytes of one token and one KV head, and ``formats`` say
    how their elements are stored. ``name`` is the user's. ``block_size`` is in tokens. ``planes``
    say how a block lies in memory where strides do not. ``root`` holds plain JSON values:
    everything that makes the model's KV its own, the same on all ranks.
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
    root: dict[str, object]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of ``root``."""
        return blake3(canonical_bytes(self.root)).hexdigest()


def describe_model(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    chunk_size: int | None,
    namespace: str,
    model_digest: str,
) -> ModelDescription:
    """Describe the model to the process that asks.

    ``chunk_size`` is in tokens; ``None``: a chunk is one block. ``model_digest``: how weights are
    told apart, ``sampled``, ``full`` or a name of the user's. Raises :class:`UnsupportedError` with
    one sentence on what cannot be cached.
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
    packing = _packing(vllm_config, chunk_size, list(layer_specs(group).values()))
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
        root={
            "namespace": namespace,
            "weights": _weights_identity(vllm_config, model_digest),
            "packing": packing.name,
            **_architecture(vllm_config, spec),
        },
    )


# -- shapes --------------------------------------------------------------------------------------


def _layer_widths(group: KVCacheGroupSpec) -> dict[str, int]:
    """Content bytes per token and KV head of each layer, in model order."""
    specs = layer_specs(group)
    return {
        name: specs[name].state_content_size_bytes
        for name in sorted(specs, key=extract_layer_index)
    }


def _packing(vllm_config: VllmConfig, chunk_size: int, specs: list[Any]) -> Packing:
    if not current_platform.is_cpu():
        return Packing(None, ())
    spec = specs[0]
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


# -- identity ------------------------------------------------------------------------------------


def _architecture(vllm_config: VllmConfig, spec: Any) -> dict[str, object]:
    """What beside the weights changes KV bytes, and nothing that only says where or how we run."""
    model = vllm_config.model_config
    return {
        "config": config_digest(model.hf_config.to_dict()),
        "architecture": model.architecture,
        "code_revision": model.code_revision,
        "dtype": str(model.dtype),
        "quantization": [model.quantization, str(model.quantization_config)],
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "kv_spec": [
            type(spec).__name__,
            str(spec.dtype),
            spec.head_size,
            spec.head_size_v,
            str(spec.kv_quant_mode),
            spec.state_content_size_bytes,
            spec.sliding_window,
        ],
        "kv_heads": _total_kv_heads(vllm_config),
        "layers": model.get_total_num_hidden_layers(),
    }


def _weights_identity(vllm_config: VllmConfig, mode: str) -> str:
    """A digest of the weights if they are on this host's disk, else their name and revision."""
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    if mode not in ("sampled", "full"):
        return f"named:{mode}"
    if "dummy" in load_format:
        return f"dummy:{model.seed}"
    path = _local_path(model.model, model.revision, vllm_config.load_config.download_dir)
    digest = directory_digest(path, mode) if path is not None else None
    if digest is not None:
        return f"{mode}:{digest}"
    logger.warning(
        "The weights of %s are not on this host's disk: instances recognise each other by its name "
        "and revision alone. Set model_digest to a name of your own if that is not enough.",
        model.model,
    )
    return f"remote:{model.model}@{model.revision}"


def _local_path(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError, ValueError):
        return None
