"""The connector as vLLM's aggregator and runners call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import (
    KVConnectorModelRunnerMixin as FirstRunner,
)

from lmcache_connector.connector import LMCacheTieredConnector, PlanMetadata, ReportMetadata
from lmcache_connector.errors import ConfigError, FailureLog, UnsupportedError
from lmcache_connector.handover import LMCacheP2PConnector
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import (
    CacheEvent,
    JobResult,
    LoadJob,
    Outcome,
    RankReport,
    StepOutput,
    StepPlan,
)
from lmcache_connector.scheduler.guard import SchedulerGuard
from tests.support.vllm_configs import kv_cache, vllm_config


def output_of(kv_output: KVConnectorOutput | None) -> ModelRunnerOutput:
    import copy

    output = copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
    output.kv_connector_output = kv_output
    return output


def report(rank: int, outcome: Outcome, num_chunks: int) -> RankReport:
    result = JobResult(7, outcome, num_chunks, 0, 0.0)
    return RankReport(rank, (CacheEvent(b"k" * 32, True),), (result,))


def test_wrong_settings_end_the_start_with_vllms_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the model is loaded, on GPUs too, and not wrapped by pydantic."""
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda _: True)
    transfer = {
        "kv_connector": "LMCacheTieredConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "lmcache_connector",
    }
    graphs = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)

    def build(**extra: Any) -> VllmConfig:
        made = KVTransferConfig(**transfer, kv_connector_extra_config=extra)
        return VllmConfig(kv_transfer_config=made, compilation_config=graphs)

    assert build(cpu_gib=1).compilation_config.cudagraph_mode is CUDAGraphMode.FULL
    with pytest.raises(ConfigError, match="did you mean 'cpu_gib'"):
        build(cpu_gb=1)


def test_kv_transfers_need_the_ranks_of_an_engine_on_one_host(tiny_model: Path) -> None:
    """The other instance looks for all of them where rank 0 is."""
    config = vllm_config(tiny_model, tensor_parallel_size=2)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="LMCacheP2PConnector", kv_role="kv_producer"
    )
    config.parallel_config.nnodes = 2
    with pytest.raises(UnsupportedError, match="an engine on several hosts cannot transfer KV"):
        LMCacheP2PConnector(config, KVConnectorRole.WORKER, kv_cache())


@pytest.fixture
def aggregator() -> KVOutputAggregator:
    """vLLM's own, for two ranks; the connector does not change how many must report."""
    connector = object.__new__(LMCacheTieredConnector)
    return KVOutputAggregator.from_connector(connector, world_size=2)


@pytest.mark.parametrize("silent", [None, 0, 1])
def test_reports_of_all_ranks_arrive(aggregator: KVOutputAggregator, silent: int | None) -> None:
    """A rank without a report does not hide the others'."""
    reports = (report(0, Outcome.DONE, 3), report(1, Outcome.MISSING, 1))
    said = tuple(made for made in reports if made.rank != silent)
    outputs = [
        output_of(
            KVConnectorOutput(kv_connector_worker_meta=ReportMetadata((made,)))
            if made in said
            else None
        )
        for made in reports
    ]
    whole = aggregator.aggregate(outputs)
    assert whole is not None
    found = whole.kv_connector_output
    assert found is not None
    assert isinstance(found.kv_connector_worker_meta, ReportMetadata)
    assert found.kv_connector_worker_meta.reports == said


# -- a step, as vLLM's versions and runners call it ------------------------------------------------


class NamedPlan(str):
    """A plan without loads that equals its name."""

    __slots__ = ()
    loads: Sequence[LoadJob] = ()


class Recorder:
    """A worker side that records its calls and their plans."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def take_metrics(self) -> None:
        """Nothing is counted."""

    def __getattr__(self, name: str) -> Callable[..., StepOutput]:
        def told(*arguments: object) -> StepOutput:
            self.calls.append((name, arguments[-1] if arguments else None))
            return StepOutput()

        return told

    def of(self, plan: object) -> list[str]:
        return [name for name, of in self.calls if of == plan]


EVERYTHING = ["handle_preemptions", "start_forward", "start_loads", "end_forward"]
LOAD, SAVE, RESULTS, CLEAR = "start_load_kv", "wait_for_save", "get_transfer_results", "clear"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def connector(recorder: Recorder) -> LMCacheTieredConnector:
    """A connector's worker side, without an engine."""
    connector = object.__new__(LMCacheTieredConnector)
    connector._worker = recorder  # type: ignore[assignment]
    connector._kv_transfer_config = KVTransferConfig(engine_id="one")
    connector._step = connector._step_output = connector._scheduler = connector._guard = None
    return connector


def planner_of(engine_id: str = "one", **scheduler: Any) -> Any:
    """The scheduler side of an engine's connector. ``scheduler``: attributes of its `Scheduler`."""
    planner: Any = object.__new__(LMCacheTieredConnector)
    planner._scheduler = SimpleNamespace(**scheduler)
    planner._guard = SchedulerGuard(planner._scheduler, FailureLog())
    planner._kv_transfer_config = KVTransferConfig(engine_id=engine_id)
    return planner


def step(connector: LMCacheTieredConnector, plan: str, calls: Sequence[str]) -> None:
    """A step of ``plan``, with ``calls`` after its start."""
    metadata = PlanMetadata(NamedPlan(plan))
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    for call in calls:
        if call == LOAD:
            connector.start_load_kv(None)
        elif call == SAVE:
            connector.wait_for_save()
        elif call == RESULTS:
            connector.get_transfer_results(set())
        else:
            connector.clear_connector_metadata()


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((LOAD, SAVE, RESULTS, CLEAR), id="all runners"),
        pytest.param((LOAD, RESULTS, SAVE, CLEAR), id="with a speculator: V1, and V2 since 0.33"),
        pytest.param((LOAD, LOAD, SAVE, SAVE, RESULTS, CLEAR, CLEAR), id="every call twice"),
    ],
)
def test_a_plan_is_executed_once_and_before_the_next_one(
    connector: LMCacheTieredConnector, recorder: Recorder, calls: Sequence[str]
) -> None:
    step(connector, "first", calls)
    step(connector, "second", calls)
    step(connector, "third", calls)
    assert recorder.of("first") == recorder.of("second") == recorder.of("third") == EVERYTHING
    begun = [str(of) for _, of in recorder.calls if of is not None]
    assert begun == sorted(begun)  # in the order of their names


@pytest.fixture
def in_an_engine(
    model: Path, connector: LMCacheTieredConnector, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """vLLM's runners find the connector; a forward pass is under way."""
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    with set_forward_context(None, vllm_config(model)):
        yield


def scheduled(plan: str) -> Any:
    """The part of a scheduler's output that a runner reads."""
    return SimpleNamespace(
        kv_connector_metadata=PlanMetadata(NamedPlan(plan)),
        has_sync_kv_loads=False,
        finished_req_ids=set(),
    )


@pytest.mark.parametrize("speculates", [False, True])
def test_a_step_that_drafts_ends_after_its_results(
    connector: LMCacheTieredConnector, recorder: Recorder, speculates: bool
) -> None:
    """Beside drafters without KV, too: vLLM copies recurrent states after the results."""
    config = SimpleNamespace(speculative_config=object() if speculates else None)
    made = {"_worker": None, "_vllm_config": config, "_make_worker": lambda caches: recorder}
    for name, value in made.items():
        setattr(connector, name, value)
    connector.register_kv_caches({})
    connector.get_finished(set())
    assert connector._is_in_step == speculates


@pytest.mark.usefixtures("in_an_engine")
@pytest.mark.parametrize("speculates", [False, True])
def test_a_step_of_the_first_runner(
    connector: LMCacheTieredConnector, recorder: Recorder, speculates: bool
) -> None:
    connector._ends_late = speculates
    for plan in ("first", "second"):
        step = scheduled(plan)
        connector.handle_preemptions(step.kv_connector_metadata)  # as its execute_model does
        with FirstRunner.maybe_get_kv_connector_output(step, defer_finalize=speculates):
            assert recorder.of(plan) == EVERYTHING[:2]
        if speculates:
            FirstRunner.finalize_kv_connector()
    assert recorder.of("first") == recorder.of("second") == EVERYTHING


@pytest.fixture
def second_runner(connector: LMCacheTieredConnector, in_an_engine: None) -> ActiveKVConnector:
    runner = object.__new__(ActiveKVConnector)
    runner.kv_connector = connector
    runner._disabled, runner._pending_load_kwargs = False, None
    return runner


def test_a_step_of_the_second_runner(second_runner: ActiveKVConnector, recorder: Recorder) -> None:
    for plan in ("first", "second"):
        second_runner.pre_forward(scheduled(plan))
        second_runner.post_forward(set())
    assert recorder.of("first") == recorder.of("second") == EVERYTHING


def test_a_step_of_the_second_runner_with_a_speculator(
    second_runner: ActiveKVConnector, recorder: Recorder
) -> None:
    if not hasattr(second_runner, "finalize_step"):
        pytest.skip("vLLM has it since 0.33: make newer runs this")
    for plan in ("first", "second"):
        second_runner.pre_forward(scheduled(plan))
        second_runner.post_forward(set(), defer_finalize=True)
        assert "end_forward" not in recorder.of(plan)
        second_runner.finalize_step()
    assert recorder.of("first") == recorder.of("second") == EVERYTHING


def test_stores_of_a_speculator_wait_for_its_pass(
    connector: LMCacheTieredConnector, recorder: Recorder
) -> None:
    step(connector, "only", (LOAD, RESULTS))
    assert "end_forward" not in recorder.of("only")
    connector.wait_for_save()
    assert "end_forward" in recorder.of("only")


@pytest.mark.usefixtures("in_an_engine")
@pytest.mark.parametrize(("engine_id", "failed"), [("one", ["lost"]), ("another", [])])
def test_a_step_that_reached_no_worker_of_the_engine_has_failed(
    connector: LMCacheTieredConnector, recorder: Recorder, engine_id: str, failed: list[str]
) -> None:
    plans = iter(["first", "lost", "third", "fourth"])
    planner = planner_of(engine_id, build_plan=lambda _: NamedPlan(next(plans)))
    for is_lost in (False, True, False, False):
        metadata = planner.build_connector_meta(None)
        if engine_id != "one":
            connector.handle_preemptions(PlanMetadata(metadata.plan))  # of its own engine
            connector.clear_connector_metadata()
        elif not is_lost:
            connector.handle_preemptions(metadata)
            connector.clear_connector_metadata()
    assert [plan for call, plan in recorder.calls if call == "step_failed"] == failed


@pytest.mark.usefixtures("in_an_engine")
def test_of_two_steps_that_fail_in_a_row_both_are_known(
    connector: LMCacheTieredConnector, recorder: Recorder
) -> None:
    plans = iter(["inputs fail", "never arrives", "third"])
    planner = planner_of(build_plan=lambda _: NamedPlan(next(plans)))
    connector.handle_preemptions(planner.build_connector_meta(None))
    planner.build_connector_meta(None)
    planner.build_connector_meta(None)
    failed = [plan for call, plan in recorder.calls if call == "step_failed"]
    assert failed == ["inputs fail", "never arrives"]


@pytest.mark.usefixtures("in_an_engine")
@pytest.mark.parametrize(("num_batches", "has_neighbours"), [(1, False), (2, False), (1, True)])
def test_a_report_that_vllm_has_lost_is_told_again(
    connector: LMCacheTieredConnector,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    num_batches: int,
    has_neighbours: bool,
) -> None:
    """The engine's user has interrupted it between the third step and the update from it."""
    if has_neighbours:
        several: Any = object.__new__(MultiConnector)
        several._connectors = [connector]
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", several)
    planner = planner_of(build_plan=lambda _: None, update_from_reports=lambda reports: ())
    planner._kv_cache_manager = None
    for each in (connector, planner):
        each._vllm_config = SimpleNamespace(max_concurrent_batches=num_batches)
    outputs: list[KVConnectorOutput] = []
    for number in range(1, 7):
        metadata = planner.build_connector_meta(None)
        ended = frozenset({f"load {number}"})
        told = StepOutput(ended, ended, reports=(report(0, Outcome.DONE, number),))
        monkeypatch.setattr(connector._worker, "finish_step", lambda told=told: told, raising=False)
        connector.handle_preemptions(metadata)
        sent, received = connector.get_finished(set())
        meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        outputs.append(KVConnectorOutput(sent, received, kv_connector_worker_meta=meta))
        if number >= num_batches and number - num_batches + 1 != 3:
            planner.update_connector_output(outputs[number - num_batches])
    assert recorder.of([b"k" * 32]) == ["report_all"]
    told_again = 3 + num_batches  # the first step planned after vLLM should have updated
    for number, output in enumerate(outputs, start=1):
        loads = [3, number] if number == told_again else [number]
        assert output.finished_recving == {f"load {load}" for load in loads}
        # MultiConnector counts the connectors that reported a send, and has counted this one.
        sends = [number] if has_neighbours else loads
        assert output.finished_sending == {f"load {load}" for load in sends}
        assert isinstance(output.kv_connector_worker_meta, ReportMetadata)
        reports = output.kv_connector_worker_meta.reports
        assert [made.results[0].num_chunks for made in reports] == loads
        # Its chunks may have been evicted since: no load inside a step relies on them.
        assert [made.events[0].is_leaving for made in reports] == [load < number for load in loads]


def test_a_worker_of_another_process_notices_a_step_that_did_not_arrive(
    connector: LMCacheTieredConnector, recorder: Recorder
) -> None:
    for number in (1, 2, 4, 5):
        connector.handle_preemptions(PlanMetadata(None, number=number))
        assert ("step_failed", None) not in recorder.calls or number > 2
        connector.clear_connector_metadata()
    assert recorder.calls == [("step_failed", None)]


def test_steps_may_be_planned_before_earlier_ones_arrive(
    connector: LMCacheTieredConnector, recorder: Recorder
) -> None:
    planner = planner_of(build_plan=lambda _: None)
    for metadata in [planner.build_connector_meta(None) for _ in range(3)]:
        connector.handle_preemptions(metadata)
        connector.clear_connector_metadata()
    assert recorder.calls == []


def test_after_an_interrupt_in_its_planning_the_next_plan_starts_over() -> None:
    def interrupted(scheduler_output: object) -> None:
        raise KeyboardInterrupt

    started_over: list[None] = []
    planner = planner_of(
        build_plan=interrupted, start_over=lambda: started_over.append(None), tally=Tally()
    )
    with pytest.raises(KeyboardInterrupt):
        planner.build_connector_meta(None)
    assert started_over == [None]
    planner._scheduler.build_plan = lambda _: StepPlan()
    metadata = planner.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))
    assert metadata.plan.starts_over


def test_a_rank_stops_its_copies_before_it_sleeps(
    connector: LMCacheTieredConnector, recorder: Recorder
) -> None:
    connector.unregister_kv_caches()
    connector.unregister_kv_caches()
    assert recorder.calls == [("stop_copies", None)] * 2
    connector._worker = None
    connector.unregister_kv_caches()


def test_the_caches_of_another_engine_are_refused(
    connector: LMCacheTieredConnector, recorder: Recorder
) -> None:
    """vLLM has one connector per process, however many engines."""
    with pytest.raises(UnsupportedError, match="end the other engine first"):
        connector.register_kv_caches({})
    step(connector, "only", (LOAD, SAVE, RESULTS, CLEAR))
    assert recorder.of("only") == EVERYTHING
