"""The scheduler side: finds hits, plans load and store jobs, learns how they ended.

Token ranges of one request, chunks of ``chunk_size`` tokens::

    |-- vLLM has these --|------ hit, loaded ------|-- computed --|
    0            num_computed                  hit end        num_tokens
              first chunk ^ may begin inside a chunk

One :class:`RequestState` per request holds everything known about it, and outlives the request
while store jobs still read what were its blocks. The hit finder, the load planner, the block
witness and the store planner each own a part of it; the adapter owns the rest, and calls them in
vLLM's order. Runs on the engine's scheduler thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from lmcache_connector.audit.limits import Verdict
from lmcache_connector.audit.root_epochs import RootEpochs, RootState
from lmcache_connector.cost_model.load_policy import LoadPolicy
from lmcache_connector.errors import ConfigError
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.kv_events.log import KvEventSink
from lmcache_connector.kv_events.vllm_events import describe_chunk
from lmcache_connector.metrics.samples import Samples
from lmcache_connector.metrics.tally import Tally
from lmcache_connector.plans import (
    AuditJob,
    JobResult,
    LoadedAdapterList,
    LoadJob,
    Outcome,
    RankReport,
    StepPlan,
    StoreJob,
    Tier,
)
from lmcache_connector.requests.encoder_witness import EncoderWitness
from lmcache_connector.requests.identifier import UNREAD, NotYet, RequestIdentifier
from lmcache_connector.scheduler.auditor import Auditor, Finding
from lmcache_connector.scheduler.background_lookup import PENDING
from lmcache_connector.scheduler.block_witness import BlockWitness
from lmcache_connector.scheduler.chunk_index import ChunkIndex
from lmcache_connector.scheduler.engine_start import EngineStart
from lmcache_connector.scheduler.hit_finder import HitFinder
from lmcache_connector.scheduler.jobs import PlannedJob, PlannedJobs
from lmcache_connector.scheduler.load_planner import LoadPlanner
from lmcache_connector.scheduler.metrics import SchedulerMetrics
from lmcache_connector.scheduler.prefill_work import prefill_work
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings
from lmcache_connector.scheduler.store_planner import StorePlanner, adapter_of
from lmcache_connector.scheduler.wanted_chunks import WantedChunks
from lmcache_connector.vllm_compat.short_loads import ShortLoad

_READ_WAIT_SECONDS = 0.005
"""For what is being read of a request while nothing runs: an idle step would take no less."""

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)

_AFTER_RESET = {
    RootState.SHARED: "its weights have a new label, under which it shares KV from now on.",
    RootState.PROBATION: "it loads nothing from before, and shares KV with no other instance, until"
    " an audit finds that its weights are the same.",
    RootState.APART: "it loads nothing from before, and shares KV with no other instance.",
}


class SchedulerAdapter:
    """Maps vLLM's scheduler-side connector calls onto plans.

    ``identifier`` says what makes a request's KV unique. ``kv_events`` is told what the tiers take
    in and let go. ``read_label()`` names the weights at a reset; it raises ``ConfigError`` if it
    cannot. ``wanted``: for a Redis to write to.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        start: EngineStart,
        identifier: RequestIdentifier,
        *,
        index: ChunkIndex,
        hits: HitFinder,
        policy: LoadPolicy,
        kv_events: KvEventSink,
        tally: Tally,
        metrics: SchedulerMetrics,
        epochs: RootEpochs,
        auditor: Auditor,
        read_label: Callable[[], str],
        wanted: WantedChunks | None = None,
    ) -> None:
        self.index = index
        self.hits = hits
        self.policy = policy
        self.kv_events = kv_events
        self.tally = tally
        self.witness = BlockWitness(settings)
        self._metrics = metrics
        self.wanted = wanted
        self._settings = settings
        self._engine_start = start
        self._identifier = identifier
        self._loaded_adapters = identifier.adapters.loaded
        self._encoders = EncoderWitness()
        self._may_wait = True
        self._epochs = epochs
        self._auditor = auditor
        self._read_label = read_label
        self._states: dict[str, RequestState] = {}
        self._jobs = PlannedJobs(settings.world_size)
        self._loads = LoadPlanner(settings, index, policy, tally, self._jobs.new_id)
        self._stores = StorePlanner(settings, index, tally, self._jobs.new_id)
        # Requests in the last plan that have not finished since.
        self._scheduled: set[str] = set()
        self._short_loads: list[ShortLoad] = []
        self._keeps_for_stores = False  # in the step being scheduled

    # -- hits ----------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Hash the prompt and ask Redis at once: the answer is there when it is scheduled."""
        state = self._state(request)
        if not isinstance(state, RequestState) or request.skip_reading_prefix_cache:
            return
        self._auditor.ask(state, self.hits)
        if self._settings.loads:
            self.hits.ask(state, first=0)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond ``num_computed_tokens``, and whether that is done
        between steps; ``None``: ask again in the next step."""
        self._keep_for_stores()
        if request.skip_reading_prefix_cache:
            return 0, False
        wait_seconds = _READ_WAIT_SECONDS if self.is_idle and self._may_wait else 0.0
        state = self._state(request, wait_seconds)
        is_current = self._identifier.is_current(request, wait_seconds)
        if state is UNREAD or is_current is UNREAD:
            # Even if it will load nothing: what is computed before it has a name is not stored.
            self._may_wait = False
            return None, False
        if state is None or not is_current:
            return 0, False
        found = self._auditor.find_shared(
            state, self.hits, num_computed_tokens, is_idle=self.is_idle
        )
        if found is PENDING:
            return None, False
        if not (self._settings.loads and state.load.is_allowed):
            return 0, False
        self._cancel_stores()
        hit = self.hits.find(state, num_computed_tokens, is_idle=self.is_idle)
        if hit is PENDING:
            return None, False
        hit = self._auditor.cut(state, num_computed_tokens, hit)
        num_tokens = self._loads.offer(state, num_computed_tokens, hit)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Plan the load of ``num_external_tokens`` into the request's blocks, listed per KV cache
        group."""
        state = self._states.get(request.request_id)
        if num_external_tokens <= 0 or state is None or state.load.job is not None:
            return
        job = self._loads.plan(state, block_ids, num_external_tokens)
        first = state.load.offered_from // self._settings.chunk_size
        self._start(state, job, range(first, first + len(job.keys)))

    def redis_hit_tokens(self, request: Request) -> int:
        """Of the load planned last for this request: tokens that come from Redis."""
        state = self._states.get(request.request_id)
        return state.load.redis_tokens if state is not None else 0

    @property
    def is_idle(self) -> bool:
        """Whether all requests of the last plan have finished."""
        return not self._scheduled

    # -- plans ---------------------------------------------------------------------------------

    def build_plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Everything planned since the last step, and the stores this step makes possible."""
        self.witness.put_last()
        self._keeps_for_stores = False
        for request_id in scheduler_output.preempted_req_ids or ():
            if (state := self._states.get(request_id)) is not None:
                self._auditor.drop(state)
                state.restart()
        self._cancel_stores()
        for new in scheduler_output.scheduled_new_reqs:
            self._identifier.give_up(new.req_id)
        self._encoders.next_step(scheduler_output, self._identifier.multimodal)
        self._plan_stores(scheduler_output)
        self._scheduled = set(scheduler_output.num_scheduled_tokens)
        self._may_wait = True
        self.hits.next_step()
        return self._jobs.take_plan(
            idle=not self._scheduled,
            prefill=prefill_work(scheduler_output, self._states),
            probe=self._wants_probe(),
            wanted=self.wanted.take() if self.wanted is not None else (),
            adapter_question=self._loaded_adapters.take_question() if self._loaded_adapters else 0,
            heard_adapters=self._loaded_adapters.heard if self._loaded_adapters else (),
        )

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Its blocks go back to vLLM at once: stores read them until vLLM hands them out again."""
        self._scheduled.discard(request.request_id)
        self._identifier.forget(request)
        state = self._states.get(request.request_id)
        if state is None or state.is_finished:
            return
        state.is_finished = True
        state.lookup.cancel()
        self._auditor.drop(state)
        if state.load.job is not None:
            # vLLM itself keeps the blocks of an aborted load until it is reported.
            self._jobs.cancel_load(state.load.job)
        elif self._settings.stores:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            self._plan_store(state, self.witness.finished(state, computed), lambda: block_ids)
        if not state.has_jobs:
            self._forget(state)

    def keep_until_updated(self, request: Request) -> None:
        """A request that has just finished gives its blocks back. Until :meth:`updated`, those that
        stores read are kept, to be handed out last."""
        if (state := self._states.get(request.request_id)) is not None:
            self.witness.keep(self._jobs.blocks_read_of(state))

    def updated(self) -> None:
        """vLLM has seen to all that a step has brought."""
        self.witness.put_last()

    @property
    def has_open_stores(self) -> bool:
        """Whether steps must go on, for a store to be reported."""
        return self._jobs.has_stores

    # -- reports -------------------------------------------------------------------------------

    def update_from_reports(self, reports: Sequence[RankReport]) -> list[ShortLoad]:
        """``reports``: of all ranks that had something to report in one step. Returns the loads
        that have ended with it and did not bring everything."""
        if self._engine_start.hasher is None:
            self.policy.calibrate(self._engine_start.update(reports))
        self.policy.observe_reports(reports)
        for report in reports:
            self.index.apply(report.rank, report.events)
            self.kv_events.apply(report)
            if report.adapters is not None:
                self._learn_adapters(report.rank, report.adapters)
            for result in report.results:
                self._finish_rank(report.rank, result)
        short_loads, self._short_loads = self._short_loads, []
        return short_loads

    def take_metrics(self) -> Samples | None:
        """What there is to tell ``/metrics`` since the last call; ``None`` if nothing is."""
        return self._metrics.take(is_idle=self.is_idle)

    def reset_cache(self) -> None:
        """From now on this instance hits nothing it stored before, unless its weights are known.

        vLLM tells a connector nothing of weight updates, neither when nor to what: it sees a reset.
        A new label names the new weights: their keys are shared with all who have that label.
        Without one this instance uses keys of its own, until an audit finds that the weights are
        the same. Other instances keep theirs. O(requests in flight).
        """
        state = self._epochs.reset(self._label(), audits=self._auditor.after_reset)
        logger.warning("The KV cache was reset: %s", _AFTER_RESET[state])
        self.tally.set("roots_apart", value=self._epochs.num_apart())
        self._auditor.forget()
        self._encoders.clear()
        self.kv_events.clear()
        self.witness.forget()
        self._rekey(self._states.values())

    def _label(self) -> str:
        try:
            return self._read_label()
        except ConfigError as error:
            logger.error("%s. The weights count as unknown.", error)
            return self._epochs.label

    def _rekey(self, states: Iterable[RequestState]) -> None:
        """Requests in flight go on under the keys their roots have now."""
        for state in states:
            if state.load.job is not None:
                self._jobs.cancel_load(state.load.job)
            self._auditor.drop(state)
            state.reset(self._keys(state.keys.identity))

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless nothing is left over once all requests are gone."""
        assert not self._states, f"requests left: {list(self._states)}"
        assert len(self._jobs) == 0, f"{len(self._jobs)} jobs left"
        assert self.index.num_planned == 0, "planned chunks left"

    def shutdown(self) -> None:
        self.hits.close()
        self._identifier.close()

    # -- requests, in detail -------------------------------------------------------------------

    @property
    def _hasher(self) -> PrefixHasher:
        return self._engine_start.known_hasher

    def _state(
        self, request: Request, wait_seconds: float = 0.0
    ) -> RequestState | Literal[NotYet.UNREAD] | None:
        """The state of a request with all its full chunks hashed; ``None``: it bypasses us."""
        if self._engine_start.hasher is None:
            return UNREAD if self._engine_start.is_awaited() else None
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            identity = self._identifier.identify(request, wait_seconds)
            if not isinstance(identity, RequestIdentity):
                return UNREAD if identity is UNREAD else None
            keys = self._keys(identity)
            state = RequestState(request, keys)
            self._states[request.request_id] = state
            if self._epochs.state(keys.identity.kv_root) is RootState.PROBATION:
                shared = replace(keys.identity, weight_epoch=self._epochs.shared_epoch)
                self._auditor.put_on_probation(state, RequestKeys(self._hasher, shared))
            state.keys.extend(request.all_token_ids)
            if self.wanted is not None:
                self.wanted.sight(state.keys.keys)
        state.keys.extend(request.all_token_ids)
        return state

    def _keys(self, identity: RequestIdentity) -> RequestKeys:
        """Of a request, under the epoch that its root has now."""
        epoch = self._epochs.epoch(identity.kv_root)
        return RequestKeys(self._hasher, replace(identity, weight_epoch=epoch))

    def _follow(self, finding: Finding) -> None:
        """Do what an audit calls for."""
        root, verdict = finding.root, finding.verdict
        # Of requests that queued on probation together, another may have ended it meanwhile.
        state = self._epochs.state(root)
        if verdict is Verdict.MISMATCH and finding.strict and state is not RootState.SHARED:
            self._epochs.separate(root, keeps_keys=True)
        elif verdict is Verdict.MISMATCH:
            self._epochs.separate(root, keeps_keys=False)
            self.witness.disown()
            self._rekey([s for s in self._states.values() if s.keys.identity.kv_root == root])
        elif verdict is Verdict.MATCH and finding.strict and state is RootState.PROBATION:
            self._epochs.restore(root)
            logger.warning("An audit found the weights unchanged: KV is shared again.")
        self.tally.set("roots_apart", value=self._epochs.num_apart())

    def _forget(self, state: RequestState) -> None:
        if self._states.get(state.request.request_id) is state:
            del self._states[state.request.request_id]

    def _computes_its_own(self, state: RequestState, num_tokens: int) -> bool:
        """Whether vLLM computes the request's next tokens from what the request's name says."""
        identity, start = state.keys.identity, state.request.num_computed_tokens
        if not self._identifier.adapters.may_compute(state.request, identity.lora):
            return False
        spans = identity.multimodal
        return not spans or self._encoders.vouches(state.request, spans, start, start + num_tokens)

    # -- jobs, in detail -----------------------------------------------------------------------

    def _plan_stores(self, scheduler_output: SchedulerOutput) -> None:
        block_state = scheduler_output.kv_connector_block_state
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is None:
                continue
            num_own = num_scheduled if self._computes_its_own(state, num_scheduled) else 0
            if not self.witness.scheduled(state, num_own):
                continue
            num_tokens = state.witness.num_tokens or 0
            block_ids = partial(block_state.get_block_ids, request_id)
            if self._settings.stores and self._stores.is_due(state, num_tokens):
                self._plan_store(state, num_tokens, block_ids)
            if self._auditor.is_due(state, num_tokens):
                audit = self._auditor.plan(state, self._jobs.new_id(), block_ids)
                self._start(state, audit, audit.chunk_indices)

    def _plan_store(
        self,
        state: RequestState,
        num_witnessed_tokens: int,
        resolve_block_ids: Callable[[], Sequence[Sequence[int]]],
    ) -> None:
        job = self._stores.plan(state, num_witnessed_tokens, resolve_block_ids)
        if job is not None:
            self._start(state, job, job.chunk_indices)

    def _keep_for_stores(self) -> None:
        """While others run, a request that waits may wait for a store to have read its blocks.

        Blocks are kept within vLLM's call to schedule a step, or to see to its output, and never
        between two calls: a reset would find them.
        """
        if not self._keeps_for_stores and not self.is_idle:
            self.witness.keep(self._jobs.blocks_read_after_the_end())
        self._keeps_for_stores = True

    def _cancel_stores(self) -> None:
        """Those that read blocks vLLM has handed out: the step being planned overwrites them."""
        if reused := self.witness.take_reused():
            for planned in self._jobs.vacate(reused):
                self.index.settle(planned.job.keys, planned.job.job_id)  # no hits any more
                if not self._jobs.is_open(planned.job.job_id):
                    self._finish(planned)

    def _start(self, state: RequestState, job: LoadJob | StoreJob, chunks: Sequence[int]) -> None:
        """``chunks``: where the job's keys stand in the request."""
        keys, sizes = state.keys.keys, (self._settings.chunk_size, self._settings.block_sizes[0])
        self.kv_events.describe(
            job.keys, lambda i: describe_chunk(state.request, chunks[i], keys, *sizes)
        )
        self._auditor.learn(job)
        self._jobs.add(state, job)

    def _wants_probe(self) -> bool:
        self.policy.step_planned(len(self._scheduled))
        probe = self.policy.take_probe()
        if probe:
            self.tally.count("probes")
        return probe

    def _finish_rank(self, rank: int, result: JobResult) -> None:
        planned, has_ended = self._jobs.report(result)
        if isinstance(planned.job, LoadJob) and result.outcome is Outcome.MISSING:
            self._learn_missing(rank, planned.job.keys[result.num_chunks])
        if has_ended:
            self._finish(planned)

    def _learn_adapters(self, rank: int, adapters: LoadedAdapterList) -> None:
        if self._loaded_adapters is None:
            return
        if doubtful := self._loaded_adapters.update(rank, adapters):
            self.witness.forget()
            for state in self._states.values():
                if adapter_of(state) in doubtful:
                    self.witness.break_off(state)

    def _learn_missing(self, rank: int, key: bytes) -> None:
        """Whatever the events said, or no request would ever store this chunk again."""
        self.index.drop(rank, key)
        for tier in Tier:
            self.kv_events.gone(tier, rank, key)

    def _finish(self, planned: PlannedJob) -> None:
        state, job = planned.state, planned.job
        if isinstance(job, LoadJob):
            first = state.load.offered_from // self._settings.chunk_size
            self.witness.loaded(state, job, first, planned.num_chunks)
            short = self._loads.ended(state, job, planned.num_chunks, planned.results)
            self._short_loads += [short] if short is not None else []
        elif isinstance(job, AuditJob):
            self._follow(self._auditor.ended(state, job, planned.results))
        else:
            self._stores.ended(state, job, planned.results)
        self.kv_events.settle(job.keys)
        if state.is_finished and not state.has_jobs:
            self._forget(state)
