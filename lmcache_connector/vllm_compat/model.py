"""The model as configured in vLLM, as plain data (:class:`ModelDescription`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.config.tiered import fit_chunk_size
from lmcache_connector.kv_layout.topology import PartLayout, ranks_alike
from lmcache_connector.kv_parts.owners import Owners
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.vllm_compat.drafter import find_drafter
from lmcache_connector.vllm_compat.identity import configuration_digests
from lmcache_connector.vllm_compat.parts import block_size_of, find_parts
from lmcache_connector.vllm_compat.support import check_setup, kept_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class ModelDescription:
    """The model as this connector sees it.

    ``parts``: of its KV. ``rank``: of this process among one engine's workers (TP within PP).
    ``chunk_size``: in tokens. ``name``: the user's. ``configuration``: digests by name of
    everything beside the weights that makes the model's KV its own, as this process sees it: see
    :func:`configuration_digests`. ``has_rings``: see :func:`kept_groups`. ``lookahead`` and
    ``drafted_len``: see :class:`Drafter`; 0 and ``None`` without a drafter with KV.
    """

    parts: tuple[PartLayout, ...]
    rank: int
    chunk_size: int
    name: str
    configuration: dict[str, str]
    has_rings: bool = False
    lookahead: int = 0
    drafted_len: int | None = None

    @property
    def world_size(self) -> int:
        return len(self.parts[0].geometries)

    @property
    def geometries(self) -> tuple[PartGeometries, ...]:
        """Of each rank's share of a chunk."""
        ranks = zip(*(part.geometries for part in self.parts), strict=True)
        return tuple(map(PartGeometries, ranks))

    @property
    def owners(self) -> Owners:
        return Owners(tuple(ranks_alike(part.geometries) for part in self.parts))


def describe_model(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, chunk_size: int | None
) -> ModelDescription:
    """Describe the model as the calling process sees it. ``chunk_size``: in tokens; ``None``: 128,
    or the next size that holds whole blocks. Raises :class:`UnsupportedError` with one sentence on
    what cannot be cached.
    """
    check_setup(vllm_config, kv_cache_config)
    chunk_size = fit_chunk_size(chunk_size, block_size_of(kv_cache_config))
    parts, packings = find_parts(vllm_config, kv_cache_config, chunk_size)
    drafter = find_drafter(vllm_config)
    return ModelDescription(
        parts=parts,
        rank=vllm_config.parallel_config.rank % len(parts[0].geometries),
        chunk_size=chunk_size,
        name=vllm_config.model_config.model,
        configuration=configuration_digests(vllm_config, kv_cache_config, packings),
        has_rings=len(kept_groups(kv_cache_config)) < len(kv_cache_config.kv_cache_groups),
        lookahead=drafter.lookahead if drafter is not None else 0,
        drafted_len=drafter.max_len if drafter is not None else None,
    )
