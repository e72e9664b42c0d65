"""How vLLM's calls reach the two sides of a connector.

vLLM builds every connector once per process, with the role of the scheduler or of a worker. The
scheduler side turns each engine step into a plan, vLLM carries the plan to the workers, and their
reports come back with the step's output. :class:`ConnectorBase` does that for any pair of sides; a
connector says which sides it has, and adds the calls that are its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.metrics.prometheus import ConnectorStats, TablePromMetrics
from lmcache_connector.metrics.samples import Samples
from lmcache_connector.metrics.table import Metric
from lmcache_connector.plans import StepOutput
from lmcache_connector.startup import log_through
from lmcache_connector.vllm_compat.api.names import (
    STANDING,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    MultiConnector,
    SupportsHMA,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from lmcache_connector.vllm_compat.api.versions import check_overrides, warnings
from lmcache_connector.vllm_compat.machines import core_warning
from lmcache_connector.vllm_compat.short_loads import ShortLoad, compute_the_rest

if TYPE_CHECKING:
    import torch

    from lmcache_connector.vllm_compat.api.names import (
        AttentionMetadata,
        ForwardContext,
        KVCacheConfig,
        KVConnectorOutput,
        Request,
        SchedulerOutput,
        VllmConfig,
    )


logger = logging.getLogger(__name__)


class SchedulerPart(Protocol):
    """What every scheduler side does. Called on the engine's scheduler thread only."""

    def on_new_request(self, request: Request) -> None:
        """Learn of a request that has joined the queue."""
        ...

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond ``num_computed_tokens``, and whether that is done
        between steps; ``None``: ask again in the next step."""
        ...

    def build_plan(self, scheduler_output: SchedulerOutput) -> Any:
        """The step's plan for the workers, as plain data. ``None``: it runs the model, no more."""
        ...

    def update_from_reports(self, reports: tuple[Any, ...]) -> Sequence[ShortLoad]:
        """Learn what the ranks that had news reported in one step; returns the loads that have
        ended with it and did not bring everything."""
        ...

    def reset_cache(self) -> None:
        """From now on, hit nothing that was stored before."""
        ...


class WorkerPart(Protocol):
    """What every worker side does, in the order of the calls of one step.

    A step without a plan brings two of them: ``start_forward(None)`` and ``finish_step``.
    """

    def handle_preemptions(self, plan: Any) -> None:
        """Let go of blocks that the forward pass is about to overwrite."""
        ...

    def start_forward(self, plan: Any) -> None:
        """Called right before the forward pass."""
        ...

    def start_loads(self, plan: Any) -> None:
        """Start the plan's loads: none of them is for this forward pass, which vLLM has submitted
        by now."""
        ...

    def end_forward(self, plan: Any) -> None:
        """Called after the forward pass was submitted."""
        ...

    def finish_step(self) -> StepOutput[Any]:
        """What has ended since the last step."""
        ...

    def step_failed(self, plan: Any) -> None:
        """The model has raised in the step of that plan, if it has one: what is in the blocks that
        it was to fill is not known."""
        ...

    def let_go(self) -> bool:
        """Stop every copy from or into the paged cache. False if one goes on after a bounded
        time."""
        ...

    def shutdown(self) -> None:
        """Stop all threads, within a bounded time."""
        ...


SchedulerT = TypeVar("SchedulerT", bound=SchedulerPart)
WorkerT = TypeVar("WorkerT", bound=WorkerPart)


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """The scheduler side's plan of one step, on its way to the workers; ``None``: it has none."""

    plan: Any


NO_PLAN = PlanMetadata(None)
_TWO_ENGINES = (
    "this process has an engine with a KV connector already, and vLLM would use that one for both: "
    "end the other engine first (llm.llm_engine.engine_core.shutdown()), or leave out "
    "VLLM_ENABLE_V1_MULTIPROCESSING=0, so that each engine has a process of its own"
)


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """The reports of some ranks, on their way to the scheduler side."""

    reports: tuple[Any, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.reports + other.reports)


@dataclass(slots=True)
class _Step:
    """The plan of the step under way, and which parts of it the worker side has been told."""

    plan: Any
    loads_started: bool = False
    forward_ended: bool = False


@cache
def _warn_once(text: str) -> None:
    """However many connectors this engine has, under ``MultiConnector``."""
    logger.warning("%s", text)


class ConnectorBase(KVConnectorBase_V1, SupportsHMA, Generic[SchedulerT, WorkerT]):
    """Passes vLLM's calls on to the side that this process has.

    A subclass sets ``_scheduler`` when it is built for that role, and makes ``_worker`` when vLLM
    registers its caches. ``_metrics`` lists its metrics, ``_stats_type`` words its log line.
    A call for a side that is not there raises ``RuntimeError``.

    Nearly every step only decodes, and has no plan. Its calls return at once: after a forward pass
    nothing of this lies in the processor's caches, and every further call costs a microsecond, that
    of a property too.
    """

    _metrics: ClassVar[Mapping[str, Metric]]
    _stats_type: ClassVar[type[ConnectorStats]]
    _is_in_step = False
    _handled: BaseException | None = None  # by who runs the step

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        log_through("vllm")
        if STANDING.unverified:
            check_overrides(type(self), KVConnectorBase_V1)
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            for text in (*warnings(STANDING), core_warning(vllm_config)):
                if text is not None:
                    _warn_once(text)
        self._scheduler: SchedulerT | None = None
        self._worker: WorkerT | None = None
        self._step: _Step | None = None
        self._step_output: StepOutput[Any] | None = None

    # -- scheduler side ------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PlanMetadata:
        plan = (self._scheduler or self._scheduler_side).build_plan(scheduler_output)
        return PlanMetadata(plan) if plan is not None else NO_PLAN

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, ReportMetadata):
            for load in self._scheduler_side.update_from_reports(meta.reports):
                compute_the_rest(load, self._kv_cache_manager)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        delay, params = self.request_finished_all_groups(request, (block_ids,))
        return delay, params

    def reset_cache(self) -> bool:
        """After a reset vLLM may take the memory of its paged cache away, to sleep. Engines in
        other processes first make steps until nothing is open. One that its user steps, and all of
        whose ranks are in this process, has made its last step, so copies are stopped here."""
        self._scheduler_side.reset_cache()
        return all(worker.let_go() for worker in self._workers_here())

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Under ``MultiConnector`` another connector's. vLLM's own would refuse it beyond the first
        pipeline stage."""

    # -- worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ``UnsupportedError`` for the caches of another engine. vLLM knows one connector
        per process, so both engines' plans would come here: what one of them has planned must not
        be copied to or from the blocks of the other."""
        if self._worker is not None:
            raise UnsupportedError(_TWO_ENGINES)
        self._worker = self._make_worker(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Since vLLM 0.33 the last call before the paged cache's memory is taken away, to sleep. It
        comes back at the same addresses."""
        if self._worker is not None:
            self._worker.let_go()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._is_in_step:
            self._step_failed()
        if self._step is not None:
            self._end_step()
        if not isinstance(kv_connector_metadata, PlanMetadata):
            return
        if kv_connector_metadata.plan is not None:
            self._tell("handle_preemptions", kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The last call before the forward pass."""
        if self._is_in_step:
            self._step_failed()
        if self._step is not None:
            self._end_step()
        self._is_in_step, self._handled = True, sys.exc_info()[1]
        if self._worker is None or not isinstance(connector_metadata, PlanMetadata):
            return
        plan = connector_metadata.plan
        if plan is not None:
            super().bind_connector_metadata(connector_metadata)
            self._step = _Step(plan)
        try:
            self._worker.start_forward(plan)
        except Exception as error:  # noqa: BLE001 - raised again unless it is seen to
            self._worker_failed("start_forward", error, plan)
            self._step = None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._step is not None and self._has_raised():
            self._step_failed()
        if self._step is not None and not self._step.loads_started:
            self._step.loads_started = True
            if not self._tell("start_loads", self._step.plan):
                self._step = None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: what a forward pass reads has arrived before it starts."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing, unless a connector saves layer by layer."""

    def wait_for_save(self) -> None:
        """Before ``get_finished``, or after it where a speculator runs in between."""
        if self._step is not None and self._has_raised():
            self._step_failed()
        if self._step is not None and not self._step.forward_ended:
            self._step.forward_ended = True
            self._tell("end_forward", self._step.plan)

    def clear_connector_metadata(self) -> None:
        """The last call of a step."""
        if self._step is not None:
            self._end_step()
            super().clear_connector_metadata()

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        output, self._step_output = self._step_output, None
        if output is None or output.report is None:
            return None
        return ReportMetadata((output.report,))

    def shutdown(self) -> None:
        if self._worker is not None:
            if self._is_in_step:
                self._step_failed()
            self._worker.shutdown()
            self._worker = None

    # -- metrics -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """vLLM asks both sides after every step, and adds up their answers."""
        samples = self._take_samples()
        return self._stats_type.of(samples) if samples is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return cls._stats_type(data=data) if data is not None else cls._stats_type.of(Samples())

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TablePromMetrics:
        return TablePromMetrics(
            cls._metrics, vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def _take_samples(self) -> Samples | None:
        """What is new on this side since the last call; ``None`` if nothing is."""
        raise NotImplementedError

    # -- details -------------------------------------------------------------------------------

    def _make_worker(self, kv_caches: dict[str, torch.Tensor]) -> WorkerT:
        raise NotImplementedError

    def _has_raised(self) -> bool:
        """Whether the step's forward pass has: vLLM's first model runner calls what comes after it
        all the same, its second nothing more."""
        return self._is_in_step and sys.exc_info()[1] is not self._handled

    def _step_failed(self) -> None:
        step, self._step, self._is_in_step = self._step, None, False
        if self._worker is not None:
            self._worker.step_failed(step.plan if step is not None else None)

    def _end_step(self) -> None:
        """What the step under way planned is done, whatever vLLM has called: it may have nothing to
        compute and leave calls out, as vLLM 0.30 did."""
        step, self._step = self._step, None
        if step is None:
            return
        if not step.loads_started and not self._tell("start_loads", step.plan):
            return
        if not step.forward_ended:
            self._tell("end_forward", step.plan)

    def _tell(self, call: str, plan: Any) -> bool:
        """Call the worker side with a plan. ``False``: it has raised."""
        worker = self._worker_side
        try:
            getattr(worker, call)(plan)
        except Exception as error:  # noqa: BLE001 - raised again unless it is seen to
            self._worker_failed(call, error, plan)
            return False
        return True

    def _worker_failed(self, call: str, error: Exception, plan: Any = None) -> None:
        """The worker side has raised. What is left of the plan is not called."""
        raise error

    def _workers_here(self) -> list[WorkerT]:
        """The worker sides of this connector in the scheduler's process, if they are there."""
        if not has_kv_transfer_group():
            return []
        found = get_kv_transfer_group()
        connectors = found.sub_connectors if isinstance(found, MultiConnector) else [found]
        own = [c for c in connectors if isinstance(c, type(self))]
        for connector in own:
            if connector._is_in_step:
                connector._step_failed()
        return [c._worker for c in own if c._worker is not None]

    @property
    def _scheduler_side(self) -> SchedulerT:
        if self._scheduler is None:
            raise RuntimeError("this connector has the worker role")
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerT:
        if self._worker is None:
            raise RuntimeError("register_kv_caches has not been called")
        return self._worker
