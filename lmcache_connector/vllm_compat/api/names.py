"""Every name of vLLM that the connector's other rooms use: the one door to it.

The versions are looked at before the first import, so that a vLLM that is too old, or lacks one of
these names, is refused with one sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_connector.vllm_compat.api.versions import check_versions

STANDING = check_versions()
"""Of the versions that are installed."""

with STANDING.blamed():
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
    from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = [
    "STANDING",
    "AttentionMetadata",
    "ForwardContext",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVCacheManager",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "KVTransferConfig",
    "MultiConnector",
    "Request",
    "RequestStatus",
    "SchedulerOutput",
    "SupportsHMA",
    "VllmConfig",
    "get_kv_transfer_group",
    "has_kv_transfer_group",
]
