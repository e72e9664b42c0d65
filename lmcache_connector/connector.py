"""``LMCacheTieredConnector``: what vLLM calls. It builds a side by role, and passes calls on."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from lmcache_connector.config.limits import user_cache_folder
from lmcache_connector.config.tiered import ConnectorConfig, parse_config
from lmcache_connector.connector_base import NO_PLAN, ConnectorBase, PlanMetadata
from lmcache_connector.errors import FailureLog
from lmcache_connector.kv_events.vllm_events import to_vllm
from lmcache_connector.metrics.prometheus import ConnectorStats, TieredStats
from lmcache_connector.metrics.table import METRICS
from lmcache_connector.plans import StepPlan
from lmcache_connector.scheduler.adapter import SchedulerAdapter
from lmcache_connector.scheduler.build import build_scheduler
from lmcache_connector.scheduler.guard import SchedulerGuard, costs_hits
from lmcache_connector.tracing.spans import make_spans
from lmcache_connector.vllm_compat.api.names import (
    STANDING,
    KVConnectorRole,
    RequestStatus,
    hit_sources,
)
from lmcache_connector.vllm_compat.lora_loads import adapter_folder
from lmcache_connector.vllm_compat.machines import engine_index
from lmcache_connector.vllm_compat.model import describe_model
from lmcache_connector.vllm_compat.short_loads import before_each_reset
from lmcache_connector.vllm_compat.weights import weights_identity

if TYPE_CHECKING:
    import torch

    from lmcache_connector.vllm_compat.api.names import (
        KVCacheBlocks,
        KVCacheConfig,
        KVCacheEvent,
        KVCacheManager,
        KVConnectorOutput,
        Request,
        SchedulerOutput,
        VllmConfig,
    )
    from lmcache_connector.worker.adapter import WorkerAdapter


logger = logging.getLogger(__name__)


class LMCacheTieredConnector(ConnectorBase[SchedulerAdapter, "WorkerAdapter"]):
    """Keeps KV in CPU memory and in Redis, below the GPU. The README lists its settings."""

    _metrics = METRICS
    _stats_type = TieredStats
    _guard: SchedulerGuard | None = None
    _does_both = False  # load and store, whatever its role is

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._failures = FailureLog()
        config = self._parse_config()
        self._config = config.model_copy(update={"namespace": STANDING.namespace(config.namespace)})
        if role is KVConnectorRole.SCHEDULER:
            wanted = self._config.wanted_chunk_size
            model = describe_model(vllm_config, kv_cache_config, chunk_size=wanted)
            ranks_on_host = vllm_config.parallel_config.local_world_size
            config = self._config.fitted(model.chunk_size, ranks_on_host)
            weights = weights_identity(vllm_config, config.model_digest, user_cache_folder())
            self._scheduler = build_scheduler(
                config,
                model,
                weights,
                loads=self._kv_transfer_config.is_kv_consumer or self._does_both,
                stores=self._kv_transfer_config.is_kv_producer or self._does_both,
                kv_events=self._wants_kv_events,
                find_adapter=adapter_folder,
                weak_block_hashes=_has_weak_block_hashes(vllm_config),
                num_batches=vllm_config.max_concurrent_batches,
                max_step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                spans=make_spans(vllm_config),
                engine_id=str(self._kv_transfer_config.engine_id),
                sends=self._kv_transfer_config.is_kv_producer,
                receives=self._kv_transfer_config.is_kv_consumer,
                first_rank=engine_index(vllm_config.parallel_config) * model.world_size,
                tp_size=vllm_config.parallel_config.tensor_parallel_size,
            )
            self._guard = SchedulerGuard(self._scheduler, self._failures)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. vLLM asks while it builds its configuration, long before it loads the model, so
        settings that cannot be used end the start here."""
        cls._check_settings(extra_config)
        return False

    @classmethod
    def _check_settings(cls, extra_config: dict[str, Any]) -> None:
        parse_config(extra_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is a future miss, nothing more, unless another instance waits for it."""
        return self._kv_transfer_config.is_kv_producer and self._config.peer_listen is not None

    def _parse_config(self) -> ConnectorConfig:
        return parse_config(self._kv_transfer_config.kv_connector_extra_config)

    # -- scheduler side ------------------------------------------------------------------------

    on_new_request = costs_hits()(ConnectorBase.on_new_request)
    get_num_new_matched_tokens = costs_hits((0, False))(ConnectorBase.get_num_new_matched_tokens)
    reset_cache = costs_hits(answer=False)(ConnectorBase.reset_cache)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            is_planned = self._plan_load(request, blocks, num_external_tokens)
            self._scheduler_guard.promised(request, is_planned=is_planned)
        else:
            self._admitted(request)

    @costs_hits(answer=False)
    def _plan_load(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> bool:
        return self._scheduler_side.update_state_after_alloc(
            request, blocks.get_block_ids(), num_tokens
        )

    @costs_hits()
    def _admitted(self, request: Request) -> None:
        self._scheduler_side.admitted(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PlanMetadata:
        guard, plan = self._guard or self._scheduler_guard, None
        if not guard.is_down:
            try:
                plan = (self._scheduler or self._scheduler_side).build_plan(scheduler_output)
                if guard.unsent:
                    guard.unsent.clear()
            except Exception as error:  # noqa: BLE001 - logged there
                guard.failed("build_connector_meta", error)
        if guard.has_news:
            plan = guard.add_news(plan, is_idle=not scheduler_output.num_scheduled_tokens)
        return PlanMetadata(plan) if plan is not None else NO_PLAN

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._learn(connector_output)
        if connector_output.finished_recving:
            manager = self._kv_cache_manager
            self._scheduler_guard.ended(connector_output.finished_recving, manager)

    _learn = costs_hits()(ConnectorBase.update_connector_output)

    @costs_hits({})
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """vLLM asks since 0.32."""
        from_redis = min(self._scheduler_side.redis_hit_tokens(request), num_external_tokens)
        return hit_sources(num_external_tokens - from_redis, from_redis)

    @costs_hits((False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_updating = request.status is not RequestStatus.FINISHED_ABORTED
        return self._scheduler_side.request_finished(request, block_ids, is_updating=is_updating)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler_side.witness.bind(kv_cache_manager)
        before_each_reset(kv_cache_manager, self._before_reset, is_alone=True)

    @costs_hits()
    def _before_reset(self) -> None:
        """A user who steps the engine may have made its last step, and starts no other before the
        reset hands out the blocks that its stores read."""
        for worker in self._workers_here():
            worker.finish_stores()
        self._scheduler_side.before_reset()

    @costs_hits(answer=False)
    def has_pending_block_frees(self) -> bool:
        """A request that needs blocks which a store reads waits for these, for one step, and
        preempts nobody."""
        return self._scheduler_side.will_free_blocks()

    @costs_hits(answer=False)
    def has_pending_push_work(self) -> bool:
        """Steps go on while a store or a prefetch runs: its end is reported with one."""
        return self._scheduler_side.has_unattended_jobs

    def take_events(self) -> list[KVCacheEvent]:
        """The last call of every update from a step's output."""
        guard = self._guard or self._scheduler_guard
        try:
            events = (
                [] if guard.is_down else (self._scheduler or self._scheduler_side).take_events()
            )
            return [to_vllm(event) for event in events] if events else []
        except Exception as error:  # noqa: BLE001 - logged there
            guard.failed("take_events", error)
            return []

    # -- worker side ---------------------------------------------------------------------------

    def _make_worker(self, kv_caches: dict[str, torch.Tensor]) -> WorkerAdapter:
        # Imported here: lmcache and what it brings along must not be imported before vLLM has
        # initialised the worker.
        with STANDING.blamed():
            from lmcache_connector.worker.build import build_worker

            return build_worker(
                self._config,
                self._vllm_config,
                self._kv_cache_config,
                kv_caches,
                kv_events=self._wants_kv_events,
            )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if sys.exc_info()[1] is not self._handled:  # as `_has_raised`: a call would cost more
            if self._is_in_step:
                self._step_failed()
            return set(), set()  # nobody will hear it
        self._is_in_step = False
        try:
            self._step_output = output = (self._worker or self._worker_side).finish_step()
        except Exception as error:  # noqa: BLE001 - logged there
            self._worker_failed("finish_step", error)
            self._step_output = output = self._worker_side.finish_failed_step()
        return set(output.finished_sending), set(output.finished_recving)

    def _worker_failed(self, call: str, error: Exception, plan: StepPlan | None = None) -> None:
        """It costs the jobs under way, and those of the plan."""
        self._failures.note(call, error)
        try:
            self._worker_side.start_over(call, plan)
        except Exception:
            logger.exception("LMCacheTieredConnector could not start over")

    def has_connector_metadata(self) -> bool:
        """``False`` spares every layer of every forward pass two calls that would do nothing."""
        return False

    @costs_hits()
    def shutdown(self) -> None:
        super().shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()

    # -- metrics -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        guard, side = self._guard, self._scheduler or self._worker
        if side is None or (guard is not None and guard.is_down):
            return None
        try:
            samples = side.take_metrics()
            return self._stats_type.of(samples) if samples is not None else None
        except Exception as error:  # noqa: BLE001 - logged there
            if guard is not None:
                guard.failed("get_kv_connector_stats", error)
            else:
                self._failures.note("get_kv_connector_stats", error)
            return None

    # -- details -------------------------------------------------------------------------------

    @property
    def _scheduler_guard(self) -> SchedulerGuard:
        if self._guard is None:
            raise RuntimeError("this connector has the worker role")
        return self._guard

    @property
    def _wants_kv_events(self) -> bool:
        kv_events = self._vllm_config.kv_events_config
        return kv_events is not None and bool(kv_events.enable_kv_cache_events)


def _has_weak_block_hashes(vllm_config: VllmConfig) -> bool:
    """Whether two blocks with other tokens may have one hash in vLLM's prefix cache."""
    return not vllm_config.cache_config.prefix_caching_hash_algo.startswith("sha256")
