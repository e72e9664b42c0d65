"""``LMCacheTieredConnector``, the class that vLLM calls: builds a side by role, and delegates.

vLLM builds one connector for its scheduler and one for each worker, with that role. The scheduler
side turns each engine step into a plan, vLLM carries the plan to the workers, and their reports
come back with the step's output.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache_connector.config.tiered import ConnectorConfig, check_settings, parse_config
from lmcache_connector.errors import FailureLog, UnsupportedError, log_through
from lmcache_connector.kv_events.vllm_events import to_vllm
from lmcache_connector.metrics.prometheus import TablePromMetrics, TieredStats
from lmcache_connector.metrics.samples import Samples
from lmcache_connector.metrics.table import METRICS
from lmcache_connector.plans import LoadJob, RankReport, StepOutput, StepPlan
from lmcache_connector.scheduler.build import build_scheduler
from lmcache_connector.scheduler.guard import SchedulerGuard, returns_on_failure
from lmcache_connector.scheduler.scheduler import Scheduler
from lmcache_connector.vllm_compat.api.names import (
    STANDING,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    MultiConnector,
    RequestStatus,
    SupportsHMA,
    get_kv_transfer_group,
    has_kv_transfer_group,
    hit_sources,
)
from lmcache_connector.vllm_compat.api.versions import check_overrides, warnings
from lmcache_connector.vllm_compat.short_loads import before_each_reset, compute_the_rest

if TYPE_CHECKING:
    import torch

    from lmcache_connector.vllm_compat.api.names import (
        AttentionMetadata,
        ForwardContext,
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

_TWO_ENGINES = (
    "this process has an engine with a KV connector already, and vLLM would use that one for both: "
    "end the other engine first (llm.llm_engine.engine_core.shutdown(), or, if its start failed, "
    "vllm.distributed.kv_transfer.ensure_kv_transfer_shutdown()), or leave out "
    "VLLM_ENABLE_V1_MULTIPROCESSING=0, so that each engine has a process of its own"
)


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """The scheduler side's plan of one step, on its way to the workers; ``None``: nothing to tell.
    ``number``: of the step, from 1 on."""

    plan: StepPlan | None
    number: int = 0


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """The reports of some ranks, on their way to the scheduler side. ``number``: of the step."""

    reports: tuple[RankReport, ...]
    number: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.reports + other.reports, self.number)


@cache
def _warn_once(text: str) -> None:
    """Log once, however many connectors this engine has under ``MultiConnector``."""
    logger.warning("%s", text)


class LMCacheTieredConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV in CPU memory and in Redis, below the GPU. docs/settings.md lists its settings.

    A call that needs a missing side raises ``RuntimeError``, or does nothing. Exceptions of a side
    cost hits, not the engine, except in a load inside a step: vLLM relies on the KV of its tokens.

    Most steps only decode, and have no plan. Then methods return at once: a forward pass evicts
    this code from the processor's caches, so each call, even of a property, costs a microsecond.
    """

    _does_both: ClassVar[bool] = False  # load and store, whatever the role
    # The scheduler's connector has a guard and a scheduler side, a worker's has a worker side.
    _guard: SchedulerGuard | None = None
    _scheduler: Scheduler | None = None
    _worker: WorkerAdapter | None = None
    _offers_in_step = False  # for the last hit that vLLM asked for
    _step: StepPlan | None = None  # the plan of the step under way
    _has_started_loads = False  # of that plan
    _due: StepPlan | None = None  # has loads that this step's forward pass needs
    _sent: StepPlan | None = None  # the last plan sent to the workers
    _num_steps = 0  # planned, or begun by this worker
    _step_output: StepOutput | None = None
    # Outputs by the number of their step, until the scheduler of this process has heard of them.
    _unheard: dict[int, StepOutput] | None = None
    _is_in_step = False
    _ends_late = False  # beside a drafter, vLLM may call wait_for_save after get_finished
    _handled: BaseException | None = None  # the error that the step's caller is handling

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        log_through("vllm")
        if STANDING.unverified:
            check_overrides(type(self), KVConnectorBase_V1)
        super().__init__(vllm_config, role, kv_cache_config)
        self._failures = FailureLog()
        config = self._parse_config()
        self._config = config.model_copy(update={"namespace": STANDING.namespace(config.namespace)})
        if role is KVConnectorRole.SCHEDULER:
            for text in warnings(STANDING):
                _warn_once(text)
            self._scheduler = build_scheduler(
                self._config,
                vllm_config,
                kv_cache_config,
                kv_events=self._wants_kv_events,
                does_both=self._does_both,
            )
            self._guard = SchedulerGuard(self._scheduler, self._failures)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Always false. vLLM calls this while it builds its configuration, long before it loads the
        model, so this is where unusable settings are refused."""
        check_settings({"kv_connector": cls.__name__, "kv_connector_extra_config": extra_config})
        return False

    def _parse_config(self) -> ConnectorConfig:
        return parse_config(self._kv_transfer_config.kv_connector_extra_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is only a future miss, unless another instance waits for it."""
        return self._kv_transfer_config.is_kv_producer and self._config.peer_listen is not None

    # -- scheduler side ------------------------------------------------------------------------

    @returns_on_failure()
    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.on_new_request(request)

    @returns_on_failure((0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        offer = self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)
        self._offers_in_step = bool(offer[0]) and not offer[1]
        return offer

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        is_in_step, self._offers_in_step = self._offers_in_step, False
        if num_external_tokens > 0 and is_in_step:
            # Not guarded: an error must end the engine, as vLLM relies on the KV of these tokens.
            job = self._scheduler_side.update_state_after_alloc(
                request, blocks.get_block_ids(), num_external_tokens
            )
            if job is None or not job.in_step:
                raise RuntimeError(f"the load of request {request.request_id} was not planned")
            self._scheduler_guard.unsent.append(job)
            self._load_planned(request, job, num_external_tokens)
        elif num_external_tokens > 0:
            job = self._plan_load(request, blocks, num_external_tokens)
            self._scheduler_guard.promised(request, job)
        else:
            self._on_scheduled_to_compute(request)

    @returns_on_failure()
    def _plan_load(
        self, request: Request, blocks: KVCacheBlocks, num_tokens: int
    ) -> LoadJob | None:
        job = self._scheduler_side.update_state_after_alloc(
            request, blocks.get_block_ids(), num_tokens
        )
        if job is not None:
            self._scheduler_side.load_planned(request, job, num_tokens)
        return job

    @returns_on_failure()
    def _load_planned(self, request: Request, job: LoadJob, num_tokens: int) -> None:
        self._scheduler_side.load_planned(request, job, num_tokens)

    @returns_on_failure()
    def _on_scheduled_to_compute(self, request: Request) -> None:
        self._scheduler_side.on_scheduled_to_compute(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PlanMetadata:
        guard, plan = self._guard or self._scheduler_guard, None
        if not guard.is_down:
            try:
                plan = (self._scheduler or self._scheduler_side).build_plan(scheduler_output)
                if guard.unsent:
                    guard.unsent.clear()
            except BaseException as error:  # an interrupt loses the plan, too
                guard.failed("build_connector_meta", error)
                if not isinstance(error, Exception):
                    raise
        if guard.has_updates:
            plan = guard.add_updates(plan, is_idle=not scheduler_output.num_scheduled_tokens)
        for connector in self._connectors_here:
            if connector._num_steps < self._num_steps:
                self._note_lost_step(connector)
        self._num_steps, self._sent = self._num_steps + 1, plan
        return PlanMetadata(plan, self._num_steps)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, ReportMetadata):
            self._learn(meta)
            for connector in self._connectors_here:
                if connector._unheard is not None:
                    connector._unheard.pop(meta.number, None)
        if connector_output.finished_recving:
            manager = self._kv_cache_manager
            self._scheduler_guard.ended(connector_output.finished_recving, manager)

    @returns_on_failure()
    def _learn(self, meta: ReportMetadata) -> None:
        for load in self._scheduler_side.update_from_reports(meta.reports):
            compute_the_rest(load, self._kv_cache_manager)

    @returns_on_failure({})
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Called since vLLM 0.32."""
        fetched = min(self._scheduler_side.fetched_hit_tokens(request), num_external_tokens)
        return hit_sources(num_external_tokens - fetched, fetched)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        delay, params = self.request_finished_all_groups(request, (block_ids,))
        return delay, params

    @returns_on_failure((False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_updating = request.status is not RequestStatus.FINISHED_ABORTED
        return self._scheduler_side.request_finished(request, block_ids, is_updating=is_updating)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler_side.witness.bind(kv_cache_manager)
        before_each_reset(kv_cache_manager, self._before_reset)

    @returns_on_failure()
    def _before_reset(self) -> None:
        """Complete the copies of the last step, because after the reset vLLM may reuse the blocks
        that stores read. An engine that its user steps may make no step before the reset."""
        for worker in self._workers_here():
            worker.finish_stores()
        self._scheduler_side.before_reset()

    @returns_on_failure(answer=False)
    def reset_cache(self) -> bool:
        """Reset the name of the weights, and stop the copies of workers in this process: vLLM may
        free the paged cache next (sleep mode). An engine core in a process of its own first steps
        until no store runs; an engine that its user steps, in the same process, does not."""
        self._scheduler_side.reset_cache()
        return all(worker.stop_copies() for worker in self._workers_here())

    @returns_on_failure(answer=False)
    def has_pending_block_frees(self) -> bool:
        """A request that needs blocks which a store reads waits one step for them, instead of
        preempting another request."""
        return self._scheduler_side.will_free_blocks()

    @returns_on_failure(answer=False)
    def has_pending_push_work(self) -> bool:
        """Steps go on until stores, KV transfers and questions about weights are settled."""
        return self._scheduler_side.has_unattended_jobs

    def take_events(self) -> list[KVCacheEvent]:
        """vLLM's last call in each update from a step's output."""
        guard = self._guard or self._scheduler_guard
        try:
            events = (
                [] if guard.is_down else (self._scheduler or self._scheduler_side).take_events()
            )
            return [to_vllm(event) for event in events] if events else []
        except Exception as error:  # noqa: BLE001 - logged there
            guard.failed("take_events", error)
            return []

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Metadata of another connector under ``MultiConnector``; ignored. vLLM's own method would
        refuse it beyond the first pipeline stage."""

    # -- worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ``UnsupportedError`` for the caches of a second engine. Both engines' plans would
        arrive here, at the process's only worker connector, and copies would mix up blocks."""
        if self._worker is not None:
            raise UnsupportedError(_TWO_ENGINES)
        self._worker = self._make_worker(kv_caches)
        self._ends_late = self._vllm_config.speculative_config is not None

    def _make_worker(self, kv_caches: dict[str, torch.Tensor]) -> WorkerAdapter:
        # Imported here: lmcache and its dependencies must not be imported before vLLM has
        # initialised the worker.
        with STANDING.blamed():
            from lmcache_connector.worker.build import build_worker

            return build_worker(
                self._config,
                self._vllm_config,
                self._kv_cache_config,
                kv_caches,
                kv_events=self._wants_kv_events,
                does_both=self._does_both,
            )

    def unregister_kv_caches(self) -> None:
        """Called since vLLM 0.33, before sleep mode frees the paged cache's memory, which comes
        back at the same addresses."""
        if self._worker is not None:
            self._worker.stop_copies()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM's first call of a step, before it prepares the step's inputs."""
        if self._is_in_step:
            self._step_failed()
        self._is_in_step, self._handled, self._due = True, sys.exc_info()[1], None
        self._step, self._has_started_loads = None, False
        if self._worker is None or not isinstance(kv_connector_metadata, PlanMetadata):
            return
        if kv_connector_metadata.number > self._num_steps + 1:  # a step did not arrive
            self._step_failed()
            self._is_in_step = True
        self._num_steps = kv_connector_metadata.number
        self._step = plan = kv_connector_metadata.plan
        if plan is not None:
            if plan.loads and plan.loads_in_step():
                self._due = plan
            self._tell("handle_preemptions", plan)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """vLLM's last call before the forward pass if the step has no load inside it."""
        if self._worker is None or not isinstance(connector_metadata, PlanMetadata):
            return
        try:
            self._worker.start_forward(self._step)
        except Exception as error:  # noqa: BLE001 - logged there
            self._worker_failed("start_forward", error, self._step)
            self._step = None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._step is not None and self._has_raised():
            self._step_failed()
        if self._due is not None:
            self._worker_side.load_in_step(self._due)
            self._due = None
        if self._step is not None and not self._has_started_loads:
            if not self._tell("start_loads", self._step):
                self._step = None
            self._has_started_loads = True  # not before: an interrupt may end the call half-way

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: the KV that a forward pass reads arrives before the pass starts."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing to do: whole chunks are stored after the forward pass."""

    def wait_for_save(self) -> None:
        """Called before ``get_finished``, or after it if a speculator runs in between."""
        if self._step is not None and self._has_raised():
            self._step_failed()
        if self._step is not None:
            self._tell("end_forward", self._step)
            self._step = None  # not before: an interrupt may end the call half-way

    def clear_connector_metadata(self) -> None:
        """vLLM's last call of a step."""
        self._is_in_step = False
        if self._due is not None:
            raise RuntimeError(
                "vLLM ran a step without the KV that was planned to be loaded inside it"
            )

    def has_connector_metadata(self) -> bool:
        """``False`` saves two calls per layer and forward pass, which would do nothing."""
        return False

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if sys.exc_info()[1] is not self._handled:  # `_has_raised` inlined, to save a call
            if self._is_in_step:
                self._step_failed()
            return set(), set()  # vLLM discards the answer
        self._is_in_step = self._ends_late
        try:
            output = (self._worker or self._worker_side).finish_step()
        except Exception as error:  # noqa: BLE001 - logged there
            self._worker_failed("finish_step", error)
            output = self._worker_side.finish_failed_step()
        if self._unheard is not None and (self._unheard or output.reports):
            output = self._with_lost(output, self._unheard)
        self._step_output = output
        return set(output.finished_sending), set(output.finished_recving)

    def _with_lost(self, output: StepOutput, unheard: dict[int, StepOutput]) -> StepOutput:
        """``output`` and earlier outputs that vLLM has lost, because its user interrupted it before
        it updated its scheduler from them, and then went on stepping."""
        last_heard = self._num_steps - self._vllm_config.max_concurrent_batches
        for number in [each for each in reversed(unheard) if each <= last_heard]:
            lost = unheard.pop(number)
            if isinstance(get_kv_transfer_group(), MultiConnector):  # has counted these already
                lost = replace(lost, finished_sending=frozenset())
            output = output.after(lost)
            # vLLM may have processed outputs of later steps first: report the present state.
            self._worker_side.report_all([e.key for made in lost.reports for e in made.events])
        if output.reports:
            unheard[self._num_steps] = output
        return output

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        output, self._step_output = self._step_output, None
        if output is None or not output.reports:
            return None
        return ReportMetadata(output.reports, self._num_steps)

    def _has_raised(self) -> bool:
        """Whether the step's forward pass has raised. vLLM's model runner V1 still makes the later
        calls of the step, V2 makes none."""
        return self._is_in_step and sys.exc_info()[1] is not self._handled

    def _step_failed(self) -> None:
        try:
            if self._worker is not None:
                call = "end_forward" if self._has_started_loads else "start_loads"
                self._worker.step_failed(call, self._step)
        except Exception:
            logger.exception("LMCacheTieredConnector could not start over")
        self._step, self._is_in_step = None, False  # not before: an interrupt may come above

    def _tell(self, call: str, plan: StepPlan) -> bool:
        """Call the worker side with a plan. ``False``: the call has raised."""
        worker = self._worker_side
        try:
            getattr(worker, call)(plan)
        except Exception as error:  # noqa: BLE001 - logged there
            self._worker_failed(call, error, plan)
            return False
        return True

    def _worker_failed(self, call: str, error: Exception, plan: StepPlan | None = None) -> None:
        """Cancel open jobs and, if ``call`` follows ``handle_preemptions``, jobs of ``plan``."""
        self._failures.note(call, error)
        try:
            self._worker_side.start_over(call, plan)
        except Exception:
            logger.exception("LMCacheTieredConnector could not start over")

    # -- both sides ----------------------------------------------------------------------------

    @returns_on_failure()
    def shutdown(self) -> None:
        if self._is_in_step:
            self._step_failed()
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.shutdown()

    def get_kv_connector_stats(self) -> TieredStats | None:
        """vLLM calls this on both sides after every step, and adds the results."""
        guard, side = self._guard, self._scheduler or self._worker
        if side is None or (guard is not None and guard.is_down):
            return None
        try:
            samples = side.take_metrics()
            return TieredStats(samples.to_data()) if samples is not None else None
        except Exception as error:  # noqa: BLE001 - logged there
            if guard is not None:
                guard.failed("get_kv_connector_stats", error)
            else:
                self._failures.note("get_kv_connector_stats", error)
            return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TieredStats:
        return TieredStats(Samples().to_data() if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TablePromMetrics:
        return TablePromMetrics(
            METRICS, vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    @cached_property
    def _connectors_here(self) -> list[LMCacheTieredConnector]:
        """This engine's worker connectors in the scheduler's process. Sets their ``_unheard``."""
        if not has_kv_transfer_group():
            return []
        found = get_kv_transfer_group()
        connectors = found.sub_connectors if isinstance(found, MultiConnector) else [found]
        engine_id = self._kv_transfer_config.engine_id
        own = (each for each in connectors if isinstance(each, type(self)))
        here = [each for each in own if each._kv_transfer_config.engine_id == engine_id]
        for connector in here:
            connector._unheard = {}
        return here

    def _note_lost_step(self, connector: LMCacheTieredConnector) -> None:
        """The last step did not arrive, so it has failed: the engine's user interrupted vLLM before
        the step's first call, and goes on. Workers elsewhere notice the gap in the step numbers."""
        if connector._is_in_step:  # the step before has failed, too
            connector._step_failed()
        connector._step, connector._has_started_loads = self._sent, False
        connector._num_steps = self._num_steps
        connector._step_failed()

    def _workers_here(self) -> list[WorkerAdapter]:
        """This connector's worker sides in the scheduler's process, if any."""
        for connector in self._connectors_here:
            if connector._is_in_step:
                connector._step_failed()
        return [c._worker for c in self._connectors_here if c._worker is not None]

    @property
    def _scheduler_side(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("this connector has the worker role")
        return self._scheduler

    @property
    def _scheduler_guard(self) -> SchedulerGuard:
        if self._guard is None:
            raise RuntimeError("this connector has the worker role")
        return self._guard

    @property
    def _worker_side(self) -> WorkerAdapter:
        if self._worker is None:
            raise RuntimeError("register_kv_caches has not been called")
        return self._worker

    @property
    def _wants_kv_events(self) -> bool:
        kv_events = self._vllm_config.kv_events_config
        return kv_events is not None and bool(kv_events.enable_kv_cache_events)
