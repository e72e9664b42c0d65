"""Every name of vLLM that the connector's other packages use.

Versions are checked before the first import, so that an unsuitable vLLM is refused with one
sentence.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

from lmcache_connector.vllm_compat.api.versions import check_versions

STANDING = check_versions()
"""Of the installed versions."""

with STANDING.blamed():
    from vllm import envs
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.v1.core.kv_cache_utils import (
        BlockHash,
        generate_block_hash_extra_keys,
        get_block_hash,
        get_group_id,
        maybe_convert_block_hash,
        to_event_extra_keys,
    )
    from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def evict_copies(pool: BlockPool, block: KVCacheBlock, kept: Container[int]) -> None:
    """Evict the block and all others of its hash from vLLM's prefix cache, up to one of ``kept``:
    vLLM caches a block for each of the requests that computed or loaded it at the same time."""
    if (key := block.block_hash) is None:
        return
    for _ in range(pool.num_gpu_blocks):
        found = pool.get_cached_block(get_block_hash(key), [get_group_id(key)])
        if found is None or found[0].block_id in kept:
            return
        pool.evict_blocks({found[0].block_id})


def may_sleep_unseen(vllm_config: VllmConfig) -> bool:
    """Whether the engine may sleep between two steps without telling the ranks' connectors.

    Since 0.33 every rank is told. Before, an engine in its own process runs steps until no copy is
    left. An engine stepped by its user does not; the scheduler side then stops copies of ranks in
    its own process, but cannot reach others.
    """
    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return False
    sleeps = bool(vllm_config.model_config.enable_sleep_mode)
    executor = vllm_config.parallel_config.distributed_executor_backend
    has_workers = executor not in ("uni", "external_launcher")  # maybe for one rank, too
    return sleeps and has_workers and not envs.VLLM_ENABLE_V1_MULTIPROCESSING


def hit_sources(from_memory: int, fetched: int) -> dict[Any, int]:
    """Tokens by vLLM's ``CacheHitSource``: ``HOST`` for the CPU tier; there is none for a store
    that instances share."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # since 0.32

    sources = {CacheHitSource.HOST: from_memory, CacheHitSource.EXTERNAL_UNSPECIFIED: fetched}
    return {source: count for source, count in sources.items() if count}
