"""``LMCacheP2PConnector``: the facade vLLM talks to. It picks a side by role and delegates."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from lmcache_connector.p2p.assembly import describe, make_heartbeat, make_scheduler, make_worker
from lmcache_connector.p2p.config import parse_p2p_config
from lmcache_connector.p2p.heartbeat import Heartbeat
from lmcache_connector.p2p.plans import RankReport, StepPlan
from lmcache_connector.p2p.scheduler_side import SchedulerSide
from lmcache_connector.startup import log_through
from lmcache_connector.vllm_compat import check_versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_connector.p2p.worker import P2PWorker, StepOutput

logger = logging.getLogger(__name__)

_SERVED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """The scheduler side's plan of one step, on its way to the workers."""

    plan: StepPlan


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """The reports of some ranks, on their way to the scheduler side."""

    reports: tuple[RankReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.reports + other.reports)


class LMCacheP2PConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands the KV of prompts from prefill to decode instances. See docs/disaggregated.md."""

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        log_through("vllm")
        check_versions()
        super().__init__(vllm_config, role, kv_cache_config)
        # KV that does not come is recomputed. vLLM's default would fail the request; it reads this
        # after it has built the connector.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._config = parse_p2p_config(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: P2PWorker | None = None
        self._heartbeat: Heartbeat | None = None
        self._step_output: StepOutput | None = None
        if role is KVConnectorRole.SCHEDULER:
            instance = describe(vllm_config, kv_cache_config, self._config)
            self._scheduler = make_scheduler(instance, self._config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are saved one by one, which a graph of the whole pass would skip."""
        return True

    # -- scheduler side ------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler_side.update_state_after_alloc(
            request, lambda: blocks.get_block_ids()[0], num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PlanMetadata:
        return PlanMetadata(self._scheduler_side.build_plan(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, ReportMetadata):
            self._scheduler_side.update_from_reports(meta.reports)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.request_finished(
            request, block_ids[0], is_served=request.status in _SERVED
        )

    def reset_cache(self) -> bool:
        self._scheduler_side.reset_cache()
        return True

    # -- worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        instance = describe(self._vllm_config, self._kv_cache_config, self._config)
        self._worker = make_worker(instance, self._config, kv_caches)
        if instance.rank == 0:
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

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, PlanMetadata):
            self._worker_side.handle_preemptions(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The last call before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, PlanMetadata):
            self._worker.start_forward(connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker_side.start_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: what a forward pass reads has arrived before it starts."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker_side.finish_saves(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._step_output = self._worker_side.finish_step()
        return KVConnectorTransferResults(
            finished_sending=set(self._step_output.finished_sending),
            finished_recving=set(self._step_output.finished_recving),
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self._step_output.invalid_block_ids) if self._step_output else set()

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        output, self._step_output = self._step_output, None
        if output is None or output.report is None:
            return None
        return ReportMetadata((output.report,))

    def shutdown(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    # -- details -------------------------------------------------------------------------------

    @property
    def _scheduler_side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("this connector has the worker role")
        return self._scheduler

    @property
    def _worker_side(self) -> P2PWorker:
        if self._worker is None:
            raise RuntimeError("register_kv_caches has not been called")
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlanMetadata)
        return metadata.plan
