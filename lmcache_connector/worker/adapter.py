"""The worker side: runs the plans of one rank, and reports.

``start_loads`` and ``end_forward`` hand jobs to the lanes of a :class:`JobQueue`. A store waits for
the forward pass that fills its blocks, a load for passes that may still use its blocks: the
copier's fences mark their ends. The step's thread copies only loads inside the step. It waits only
if ``finishes_stores`` is set, and up to 5 ms in an idle step until a job ends: spinning would keep
the interpreter lock from the lanes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from lmcache_connector.config import limits
from lmcache_connector.copy_kv_blocks.copier import Fence
from lmcache_connector.metrics.samples import Samples
from lmcache_connector.peers.transfers import Transfers
from lmcache_connector.plans import (
    JobResult,
    LoadJob,
    RankReport,
    RankStart,
    StepOutput,
    StepPlan,
    StoreJob,
)
from lmcache_connector.requests.adapters import is_current_and_unreplaced
from lmcache_connector.threads import Task
from lmcache_connector.vllm_compat.cpu_attention import ask_for_amx
from lmcache_connector.vllm_compat.loaded_weights import LoadedWeights
from lmcache_connector.vllm_compat.lora_loads import LoraLoads
from lmcache_connector.worker.job_queue import Job, StepGate
from lmcache_connector.worker.lmcache_engine import LoadInStep
from lmcache_connector.worker.lmcache_start import RankSettings
from lmcache_connector.worker.metrics import WorkerMetrics
from lmcache_connector.worker.paged_part import PagedPart
from lmcache_connector.worker.rank_tiers import RankTiers
from lmcache_connector.worker.self_test import RankFinder

if TYPE_CHECKING:
    from lmcache_connector.peers.commands import Chunks
    from lmcache_connector.peers.server import PeerServer
    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.storage.redis.tier import RedisTier

logger = logging.getLogger(__name__)

_IDLE_WAIT_SECONDS = 0.005
_ADAPTER_SECONDS = 2.0
_STOP_SECONDS = 5.0
# Share of the CPU tier that KV transfers to other instances may keep until they are read.
_TRANSFER_SHARE = 1 / 4
_NO_UPDATES: StepOutput = StepOutput()


class WorkerAdapter:
    """Maps vLLM's worker-side connector calls onto jobs.

    ``peers``: to load from. ``make_peer_server`` is called once, for the server that peers read
    from. :meth:`shutdown` closes all that the adapter was given. Runs on the engine's step thread.
    """

    def __init__(
        self,
        settings: RankSettings,
        kv_caches: dict[str, torch.Tensor],
        redis: RedisTier | None,
        weights: LoadedWeights,
        clock: Callable[[], float] = time.monotonic,
        lora_loads: LoraLoads | None = None,
        peers: PeerTier | None = None,
        make_peer_server: Callable[[Chunks, Transfers], PeerServer] | None = None,
    ) -> None:
        self._settings = settings
        self._lora_loads = lora_loads or LoraLoads(None)
        self._weights = weights
        rank = settings.rank
        parts = [PagedPart.from_kv_caches(part, rank, kv_caches) for part in settings.parts]
        self._tiers = tiers = RankTiers(
            settings,
            parts,
            redis,
            peers,
            clock,
            on_executed=self._executed,
        )
        if tiers.copier.shares_cores:
            ask_for_amx()  # now: the first forward pass may follow a full hit
        self._copier, self._timer, self._probe = tiers.copier, tiers.timer, tiers.probe
        self._cpu, self._jobs = tiers.engine.cpu, tiers.jobs
        self.self_test = tiers.self_test
        max_bytes = int(self._cpu.capacity_bytes * _TRANSFER_SHARE)
        self._transfers = Transfers(self._cpu, max_bytes, settings.config.lease_seconds, clock)
        self._metrics = WorkerMetrics(settings.rank, tiers, self._transfers, clock)
        self._gate = StepGate()
        self._before: Fence | None = None  # end of all earlier passes
        self._ended: list[tuple[Job, JobResult]] = []  # not reported yet
        self._in_step: list[LoadInStep] = []  # not known to have ended
        self._is_outdated = False  # the plan names other weights than those in memory
        self._has_failed = False  # a step of the engine
        self._idle = False
        self._is_between_steps = False  # no plan can come
        self._is_start_told = False
        serve = make_peer_server
        try:
            self._ranks = RankFinder(tiers.engine, parts, peers if serve else None, clock)
            self._server = serve(self._cpu, self._transfers) if serve is not None else None
        except BaseException:  # e.g. its port is taken
            tiers.close(0.0, unmap=tiers.stop(limits.SHUTDOWN_SECONDS))
            raise
        self._ranks.begin(self._server, loads=settings.loads)

    @property
    def rank(self) -> int:
        return self._settings.rank

    @property
    def redis_is_away(self) -> bool:
        """Whether some server of the Redis tier has failed, and served nothing since."""
        redis = self._tiers.redis
        servers = redis.stats().servers if redis is not None else ()
        return any(state.value for _, state in servers)

    # -- the engine's step ---------------------------------------------------------------------

    def handle_preemptions(self, plan: StepPlan) -> None:
        """Before the forward pass: cancel stores whose blocks this step overwrites. Their copies
        are dropped, because vLLM may have zeroed the blocks already."""
        if plan.transfers:  # a reader learns of a new KV transfer before a long forward pass
            self._transfers.apply(each for each in plan.transfers if each.ends_after is None)
        if plan.starts_over:
            self._jobs.cancel()
        elif plan.vacated_stores:
            self._jobs.cancel(plan.vacated_stores)
        self._gate.open()

    def start_forward(self, plan: StepPlan | None) -> None:
        """Right before the forward pass. ``None``: the step has no plan."""
        if self._is_between_steps:
            self._is_between_steps = False
            self._cpu.leaving.await_plans(may_come=True)
        if plan is None:
            self._idle = False
            if self._settings.blocks_are_zeroed:
                self._gate.open()
            return
        self._before = self._copier.fence() if plan.has_earlier_work else None
        self._timer.start(plan.prefill)

    def load_in_step(self, plan: StepPlan) -> None:
        """Right before the forward pass that reads the loaded KV. Failures, which only device
        errors and bugs cause, must end the step: vLLM has planned with this KV."""
        if plan.acked_weights and self._is_other(plan.acked_weights):
            raise RuntimeError("the weights have changed since a load inside this step was planned")
        self._in_step += map(self._tiers.engine.load_in_step, plan.loads_in_step())

    def start_loads(self, plan: StepPlan) -> None:
        """After the forward pass was submitted; before it in a step with loads inside. The other
        loads begin here: this forward pass reads none of them."""
        self._timer.stop()
        if plan.acked_leaving:
            self._cpu.leaving.note_acked(plan.acked_leaving[self._settings.rank])
        self._idle = plan.idle
        if plan.acked_weights:
            self._is_outdated = self._is_other(plan.acked_weights)
        if plan.weights_question:
            self._weights.ask(plan.weights_question)
        if plan.asks_again:
            self._report_state()
        if plan.probe:
            self._probe.request()
        if plan.uses:
            self._cpu.note(plan.uses)
        if plan.adapter_question:
            self._lora_loads.ask(plan.adapter_question)
        if plan.acked_adapters:
            self._lora_loads.note_acked(plan.acked_adapters[self._settings.rank])
        for job in plan.loads_and_earlier_stores():
            is_free = isinstance(job, LoadJob) and not job.after_passes
            self._submit(job, None if is_free else self._before)
        self._before = None
        if plan.cancelled_loads:
            self._jobs.cancel(plan.cancelled_loads)

    def end_forward(self, plan: StepPlan) -> None:
        """After the forward pass was submitted: store its blocks."""
        if plan.stores and (stores := plan.later_stores()):
            fence = self._copier.fence()
            for job in stores:
                self._submit(job, fence)
        if plan.transfers:
            self._transfers.apply(plan.transfers)
        if self._settings.finishes_stores:
            self._finish_stores()

    def finish_step(self) -> StepOutput:
        """Collect ended jobs; an idle step first waits a moment for one."""
        if self._idle:
            self._jobs.wait_for_result(_IDLE_WAIT_SECONDS)
        if self._settings.blocks_are_zeroed:
            self._gate.close()
        if not self._has_updates():
            return _NO_UPDATES
        self._take_ended()
        return self._output(self._report(self._ended))

    def finish_failed_step(self) -> StepOutput:
        """After :meth:`finish_step` has raised: report the ended jobs only."""
        self._take_ended()
        results = tuple(result for _, result in self._ended)
        return self._output(RankReport(self._settings.rank, (), results))

    def start_over(self, call: str, plan: StepPlan | None) -> None:
        """``call`` has raised and left an unknown state: cancel all jobs, also jobs of the plan
        that will not be submitted."""
        self._jobs.cancel()
        if plan is not None and call == "end_forward":
            self._jobs.refuse(plan.later_stores())
        elif plan is not None and call != "handle_preemptions":
            made = [load.job for load in self._in_step]
            if call == "start_forward":  # the forward pass needs these: they are made nevertheless
                made += plan.loads_in_step()
            loads = [job for job in plan.loads if job not in made]
            self._jobs.refuse((*loads, *plan.stores))
        if plan is not None and call != "handle_preemptions":  # that step's stores begin later
            self._transfers.apply(plan.transfers)
        self._gate.open()
        self._before, self._idle = None, False
        self.report_all()  # a report in preparation may be lost
        if plan is not None and plan.weights_question:
            self._weights.ask(plan.weights_question)
        if plan is not None and plan.adapter_question:
            self._lora_loads.ask(plan.adapter_question)

    def report_all(self, keys: Sequence[bytes] = ()) -> None:
        """Report again everything that the scheduler side keeps of this rank, and whether the
        chunks ``keys`` are in the CPU tier."""
        self._cpu.report_all(keys)
        self._report_state()

    def step_failed(self, call: str, plan: StepPlan | None) -> None:
        """A step has raised, or did not arrive, before ``call``. If the user goes on, vLLM treats
        the step's blocks as computed, so nothing is stored any more."""
        if not self._has_failed:
            logger.warning(
                "lmcache-connector: a step of this engine has failed, so some blocks were never "
                "computed. The engine stores nothing any more: start another one."
            )
        self._has_failed = True
        self.start_over(call, plan)

    def take_metrics(self) -> Samples | None:
        """New samples since the last call; ``None`` if there are none or they can wait."""
        return self._metrics.take()

    def finish_stores(self) -> None:
        """Between steps: complete the last step's copies, or cancel them after 5 s. Where vLLM
        zeroes blocks, copies wait for the next plan instead."""
        if self._settings.blocks_are_zeroed:  # a step that failed may have zeroed blocks
            return
        self._finish_stores()

    def stop_copies(self) -> bool:
        """Between steps: stop every copy from or into the paged cache. False if one still runs
        after 5 s."""
        self._jobs.cancel()
        self._gate.open()
        self._wait_for_no_plan()
        if self._jobs.cancel_all(_STOP_SECONDS):
            return True
        logger.error("A load or store did not stop within %.1f s", _STOP_SECONDS)
        return False

    def shutdown(self) -> None:
        """Takes 5 s at most for each of: the last stores, the probe of Redis, the lanes, reads from
        peers, the peer server, writes to Redis."""
        self._ranks.close()
        seconds = limits.SHUTDOWN_SECONDS
        self._wait_for_no_plan()
        self.finish_stores()
        self._gate.shut()
        are_ended = self._tiers.stop(seconds)
        if self._server is not None and not self._server.close(seconds):
            logger.warning("The peer server did not stop within %.1f s", seconds)
            are_ended = False
        self._transfers.close()
        self._tiers.close(seconds, unmap=are_ended)
        self._lora_loads.close()
        self._weights.close()

    # -- details -------------------------------------------------------------------------------

    def _is_other(self, acked_weights: Sequence[int]) -> bool:
        """Whether the plan assumes other weights than those in memory."""
        return acked_weights[self._settings.rank] != self._weights.changes.number

    def _report_state(self) -> None:
        """Report the start, the weights and the adapters with this step."""
        self._lora_loads.report_all()
        self._is_start_told, self._weights.has_updates = False, True

    def _finish_stores(self) -> None:
        self._wait_for_no_plan()
        self._jobs.finish_stores(_STOP_SECONDS)

    def _wait_for_no_plan(self) -> None:
        """Allocations must not wait for a plan: only this thread could deliver one."""
        self._is_between_steps = True
        self._cpu.leaving.await_plans(may_come=False)

    def _submit(self, job: LoadJob | StoreJob, fence: Fence | None) -> None:
        self._ranks.forget_sample()
        if self._is_outdated or (self._has_failed and isinstance(job, StoreJob)):
            self._jobs.refuse((job,))
            return
        may_begin = None
        if isinstance(job, StoreJob):
            if (adapter := job.adapter) is not None:
                names = self._lora_loads.names_of(adapter.number)
                if not names:
                    self._jobs.refuse((job,))
                    return
                may_begin = partial(_was_computed_with, adapter.digest, names)
            self._transfers.store_begins(job.job_id)
        self._jobs.submit(job, fence, gate=self._gate, may_begin=may_begin)

    def _executed(self, job: Job) -> None:
        """Runs on a lane's thread, or on the step's for a refused job."""
        if isinstance(job, StoreJob):
            self._transfers.store_ended(job.job_id, job.keys)

    def _has_updates(self) -> bool:
        """Most decode steps end here. The check reads few attributes, because a forward pass has
        evicted them from the processor's caches."""
        return bool(
            not self._is_start_told
            or self._in_step
            or self._ended
            or self._jobs.is_busy
            or self._cpu.has_updates
            or self._timer.has_updates
            or self._probe.has_updates
            or self._lora_loads.has_updates
            or self._weights.has_updates
            or self._transfers.has_updates
        )

    def _output(self, report: RankReport | None) -> StepOutput:
        loaded = [j.request_id for j, _ in self._ended if isinstance(j, LoadJob) and not j.in_step]
        sent = self._transfers.finished() if self._transfers.has_updates else frozenset()
        if sent and report is None:  # its arrival tells the connector that vLLM knows ``sent``
            report = RankReport(self._settings.rank, (), ())
        reports = () if report is None else (report,)
        output = StepOutput(sent, finished_recving=frozenset(loaded), reports=reports)
        # Last: if a line above raises, the next report has these jobs and requests.
        if sent:
            self._transfers.forget_finished(sent)
        self._ended = []
        return output

    def _take_ended(self) -> None:
        for load in self._in_step.copy():
            if (result := load.take_result()) is not None:
                self._in_step.remove(load)
                self._ended.append((load.job, result))
        if self._jobs.is_busy:
            self._ended += self._jobs.take_ended()

    def _report(self, ended: Sequence[tuple[Job, JobResult]]) -> RankReport | None:
        events = self._cpu.take_events()
        written = self._cpu.take_written() if self._cpu.written else ()
        start = None if self._is_start_told else self._start()
        forwards = self._timer.take() if self._timer.has_updates else ()
        measured = self._probe.take() if self._probe.has_updates else ()
        for job, result in ended:
            self._metrics.job_ended(job, result)
        weights, adapters = self._weights.take(), self._lora_loads.take()
        if not (ended or events or forwards or measured or written or adapters or weights or start):
            return None
        return RankReport(
            rank=self._settings.rank,
            events=events,
            results=tuple(result for _, result in ended),
            forwards=forwards,
            measured=measured,
            written=written,
            adapters=adapters,
            weights=weights,
            start=start,
            num_leaving=self._cpu.num_leaving,
        )

    def _start(self) -> RankStart | None:
        """The start report; ``None`` before Redis and readable ranks are known, or given up."""
        if self._tiers.is_calibrating or (reads := self._ranks.find()) is None:
            return None
        self._is_start_told = True
        self._cpu.share.reads = reads
        rank, parts = self._settings.rank, self._settings.parts
        return RankStart(
            self._settings.configuration,
            self._tiers.measured,
            layer_widths=tuple(part.geometries[rank].layer_widths for part in parts),
            formats=parts[0].formats,
            changes_at=self._weights.changes.place if self._settings.announces else "",
            reads=reads,
        )


def _was_computed_with(digest: str, names: Sequence[Task[str]]) -> bool:
    """Whether vLLM has read the adapter files that the scheduler side saw, and no others since."""
    return all(name.wait(_ADAPTER_SECONDS) for name in names) and is_current_and_unreplaced(
        digest, [name.value for name in names]
    )
