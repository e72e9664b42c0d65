"""``LMCacheP2PConnector``, as vLLM calls it: it picks a side by role and delegates."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_connector.connector_base import ConnectorBase
from lmcache_connector.metrics.prometheus import ConnectorStats
from lmcache_connector.metrics.samples import Samples
from lmcache_connector.p2p.build import describe, make_heartbeat, make_scheduler, make_worker
from lmcache_connector.p2p.config import parse_p2p_config
from lmcache_connector.peers.heartbeat import Heartbeat
from lmcache_connector.p2p.scheduler.adapter import P2PSchedulerAdapter
from lmcache_connector.p2p.scheduler.metrics import METRICS, log_fields
from lmcache_connector.tracing.spans import make_spans
from lmcache_connector.vllm_compat.api.names import STANDING, KVConnectorRole, RequestStatus
from lmcache_connector.vllm_compat.short_loads import before_each_reset

if TYPE_CHECKING:
    import torch

    from lmcache_connector.p2p.worker.adapter import P2PWorkerAdapter
    from lmcache_connector.vllm_compat.api.names import (
        AttentionMetadata,
        KVCacheBlocks,
        KVCacheConfig,
        KVCacheManager,
        Request,
        VllmConfig,
    )


logger = logging.getLogger(__name__)

_SERVED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class P2PStats(ConnectorStats):
    """The counts of hand-overs."""

    def reduce(self) -> dict[str, Any]:
        """For the periodic log line."""
        return dict(log_fields(self.samples))


class LMCacheP2PConnector(ConnectorBase[P2PSchedulerAdapter, "P2PWorkerAdapter"]):
    """Hands the KV of prompts from prefill to decode instances. See docs/disaggregated.md."""

    _metrics = METRICS
    _stats_type = P2PStats

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = parse_p2p_config(self._kv_transfer_config.kv_connector_extra_config)
        self._config = config.model_copy(update={"namespace": STANDING.namespace(config.namespace)})
        self._heartbeat: Heartbeat | None = None
        if role is KVConnectorRole.SCHEDULER:
            instance = describe(vllm_config, kv_cache_config, self._config)
            self._scheduler = make_scheduler(instance, self._config, make_spans(vllm_config))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A graph of the whole pass skips the saves of single layers: they follow after it."""
        return False

    # -- scheduler side ------------------------------------------------------------------------

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler_side.update_state_after_alloc(
            request, lambda: blocks.get_block_ids()[0], num_external_tokens
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_served = request.status in _SERVED
        return self._scheduler_side.request_finished(request, block_ids[0], is_served=is_served)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        before_each_reset(kv_cache_manager, self._scheduler_side.reset_cache)

    def has_pending_push_work(self) -> bool:
        """Steps go on until the ranks have read their weights after a reset."""
        return self._scheduler_side.weights.is_asked_for

    # -- worker side ---------------------------------------------------------------------------

    def _make_worker(self, kv_caches: dict[str, torch.Tensor]) -> P2PWorkerAdapter:
        instance = describe(self._vllm_config, self._kv_cache_config, self._config)
        worker = make_worker(instance, self._config, kv_caches)
        if instance.model.rank == 0:
            self._heartbeat = make_heartbeat(instance, self._config)
            logger.info(
                "LMCacheP2PConnector: %s at %s, %s, buffers of %d and %d bytes per rank, %s",
                self._kv_transfer_config.kv_role,
                instance.address,
                self._config.send_type,
                self._config.kv_buffer_size,
                self._config.overflow_bytes,
                "peers share a secret" if self._config.secret else "no secret is set",
            )
        return worker

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def shutdown(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        super().shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()

    # -- metrics -------------------------------------------------------------------------------

    def _take_samples(self) -> Samples | None:
        """The scheduler side has them all: the ranks report to it."""
        return self._scheduler.tally.take() if self._scheduler is not None else None
