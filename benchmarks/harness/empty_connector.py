"""A connector that does nothing, to measure vLLM's own calls to any connector.

Imports vLLM: only engines' processes import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

if TYPE_CHECKING:
    import torch
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_NOTHING = KVConnectorMetadata()


class EmptyConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides in one object."""

    @classmethod
    def in_place_of(cls, connector: KVConnectorBase_V1) -> EmptyConnector:
        """An empty connector for the same engine."""
        config, kv_cache = connector._vllm_config, connector._kv_cache_config
        return cls(config, KVConnectorRole.SCHEDULER, kv_cache)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return _NOTHING

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def has_connector_metadata(self) -> bool:
        return False

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None: ...

    def wait_for_save(self) -> None: ...
