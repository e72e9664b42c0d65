"""The scheduler side: finds hits, plans load and store jobs, learns how they ended.

Token ranges of one request, chunks of ``chunk_size`` tokens::

    |-- vLLM has these --|------ hit, loaded ------|-- computed --|
    0            num_computed                  hit end        num_tokens
              first chunk ^ may begin before num_computed

One :class:`RequestState` per request holds everything known about it. The state outlives the
request while store jobs still read the request's former blocks. The request book owns the set of
states and their keys; the hit finder, the load planner, the block witness, the store planner and
the auditor each own one part of every state. The scheduler calls them in vLLM's order, and runs on
the engine's scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.cost_model.prefill import MIN_PREFILL_TOKENS
from lmcache_connector.kv_events.log import BlockRun, KvEvent, KvEventLog
from lmcache_connector.kv_events.vllm_events import describe_chunk
from lmcache_connector.kv_parts.blocks import BlocksInUse
from lmcache_connector.kv_parts.part import BlockTables, Rule
from lmcache_connector.lookup.chunk_index import ChunkIndex, PrefixUses
from lmcache_connector.lookup.hit_finder import HitFinder
from lmcache_connector.metrics.samples import Samples, Tally
from lmcache_connector.plans import (
    AuditJob,
    JobResult,
    LoadedAdapterList,
    LoadJob,
    Outcome,
    PartRun,
    PrefillWork,
    RankReport,
    StepPlan,
    StoreJob,
    Tier,
)
from lmcache_connector.scheduler.auditor import Auditor
from lmcache_connector.scheduler.block_witness import BlockWitness
from lmcache_connector.scheduler.held_blocks import HeldBlocks
from lmcache_connector.scheduler.jobs import PlannedJob, PlannedJobs, span_name
from lmcache_connector.scheduler.load_planner import LoadPlanner
from lmcache_connector.scheduler.request_book import RequestBook
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings, StateOffer
from lmcache_connector.scheduler.store_planner import Snapshot, StorePlanner
from lmcache_connector.scheduler.transfers import RequestTransfers
from lmcache_connector.threads import PENDING, Pending, StepWait
from lmcache_connector.tracing.spans import Spans
from lmcache_connector.vllm_compat.short_loads import ShortLoad

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request, SchedulerOutput

_ASK_AGAIN_SECONDS = 10.0
"""How long a request may wait for a hit, KV transfers aside; then it is computed."""
_CUT_OFF = ("FINISHED_ABORTED", "FINISHED_ERROR")  # ends of requests that may not be running
_SAMPLES_SECONDS = 0.1
"""Samples for ``/metrics`` wait this long while requests run: most polls only read the clock."""


@dataclass(eq=False)
class Scheduler:
    """Maps vLLM's scheduler-side connector calls onto plans.

    ``kv_events`` records chunks that enter and leave the tiers, ``spans`` traces requests.
    """

    settings: SchedulerSettings
    book: RequestBook
    index: ChunkIndex
    hits: HitFinder
    policy: LoadPolicy
    kv_events: KvEventLog
    tally: Tally
    auditor: Auditor
    transfers: RequestTransfers
    spans: Spans = field(default_factory=Spans)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.witness = BlockWitness(self.settings)
        self._num_groups = sum(len(part.groups) for part in self.settings.parts)
        self._least_block = min(part.block_size for part in self.settings.parts)
        self._samples_at = float("-inf")
        self._to_compute: dict[str, Request] = {}
        self._refused = ("", 0)  # the request whose load vLLM did not take, and how often
        self._begin(PlannedJobs(self.settings.world_size))

    def _begin(self, jobs: PlannedJobs) -> None:
        """Set up everything that holds requests or jobs, empty."""
        settings, policy, tally = self.settings, self.policy, self.tally
        self.jobs = jobs
        self.held = HeldBlocks(settings, self.witness)
        # vLLM's model runner V2 tells of a step's tokens before its drafter has written KV.
        num_passes = settings.num_batches + (settings.drafted_len is not None)
        self.in_use = BlocksInUse(num_passes, hears_all_frees=settings.is_prefix_only)
        self._uses = PrefixUses(settings.parts, self.index, stores=settings.stores)
        self._loads = LoadPlanner(settings, self.index, policy, tally, jobs.new_id)
        self._stores = StorePlanner(settings, self.index, tally, jobs.new_id)
        # Requests in the last plan that have not finished since.
        self._scheduled: set[str] = set()
        self._was_asked = False  # for hits, since the last plan
        self._wait = StepWait(settings.step_wait_seconds, self.clock)
        self._ask_until: dict[str, float] = {}  # by request that vLLM was told to ask for again

    def start_over(self) -> None:
        """Recover from a call that raised and left an unknown state: forget all requests and jobs.
        Workers cancel theirs. Running requests bypass the connector, vLLM may reuse all blocks,
        and no KV computed so far is stored. Tier contents, measurements and root epochs stay."""
        self.witness.forget_all()
        self.book.forget_all()
        self.auditor.forget_all()
        self.book.adapters.forget()
        self.index.forget_planned()
        self.kv_events.forget_jobs()
        self.book.weights.reset(is_external=False)  # a question or an answer may be lost
        self.policy.forget_all()
        self.spans.drop_all()
        self.transfers.start_over()
        waiting = self._to_compute.items()
        self._to_compute = {name: one for name, one in waiting if not one.is_finished()}
        self._begin(PlannedJobs(self.settings.world_size, self.jobs.last_id))
        self.in_use.mark_all_in_use()

    # -- find and decide -----------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Hash the prompt and ask Redis and peers, so that the answer is there at scheduling."""
        self.policy.request_arrived(request.request_id)
        self.transfers.arrived(request)
        self._enter(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to load beyond ``num_computed_tokens``, and whether the load runs between steps.
        ``None`` tokens: vLLM asks again in the next step."""
        self._was_asked = True
        if request.request_id in self._to_compute:
            self._stores.end_a_step_at_the_last_border(request)
            return 0, False
        num_tokens = self._find(request, num_computed_tokens)
        if num_tokens is None:
            if self.transfers.is_coming(request.request_id):
                return None, False
            now = self.clock()
            if now < self._ask_until.setdefault(request.request_id, now + _ASK_AGAIN_SECONDS):
                return None, False
            self._stores.end_a_step_at_the_last_border(request)
            num_tokens = 0
        if num_tokens and self._was_refused_while_idle(request.request_id):
            num_tokens = 0
        self.spans.end(request, "lookup", {"hit_tokens": num_tokens})
        state = self.book.get(request.request_id)
        return num_tokens, num_tokens > 0 and not (state is not None and state.load.in_step)

    def _enter(
        self, request: Request, wait: StepWait | None = None
    ) -> RequestState | Literal[Pending.PENDING] | None:
        known = self.book.get(request.request_id)
        state = self.book.enter(request, wait)
        if not isinstance(state, RequestState) or state is known:
            return state
        self._uses.add(state.keys.keys, state.claim)
        if self.settings.loads and not request.skip_reading_prefix_cache:
            self.spans.begin(request, "lookup")
            self.hits.ask(state.lookup, first=0)
        return state

    def _find(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens to load after the computed ones; ``None``: vLLM must ask again."""
        self._wait.is_idle = self.is_idle and not self.settings.others_wait
        wait = self._wait if self.is_idle else None
        state = self._enter(request, wait)
        is_current = self.book.identifier.is_current(request, wait)
        if state is PENDING or is_current is PENDING:
            # Wait even if there is no hit: KV computed before identification is not stored.
            return None
        if state is None or not is_current:
            return 0
        may_load = self.settings.loads and state.load.is_allowed
        if not may_load or request.skip_reading_prefix_cache:
            self._stores.end_a_step_at_the_last_border(request)
            return 0
        self._cancel_overwritten()
        if self.transfers.find(state, num_computed_tokens, self._wait) is PENDING:
            return None
        hit = self.hits.find(state.lookup, num_computed_tokens, self._wait)
        if state.source is not None and hit is not PENDING:
            elsewhere = self.hits.find_elsewhere(
                state.lookup, num_computed_tokens, hit.stop, self._wait
            )
            if elsewhere is PENDING:
                return None
            if elsewhere is not None and self._loads.pays(state, num_computed_tokens, elsewhere):
                self.transfers.turn_down(state)
                hit = self.hits.find(state.lookup, num_computed_tokens, self._wait)
        if hit is PENDING:
            return None
        self._stores.found(state, hit)
        if not state.transfer.loads:  # a transferred prompt is loaded whole: no audit
            hit = self.auditor.cut(state, num_computed_tokens, hit)
        return self._loads.offer(
            state, num_computed_tokens, hit, may_be_in_step=self.book.weights.are_unchanged()
        )

    def _was_refused_while_idle(self, request_id: str) -> bool:
        """Whether vLLM has refused this request's load although nothing runs that could free
        blocks. vLLM reserves blocks for requests whose load failed, and such a request may queue
        behind this one. A load must leave these blocks free; computing the request need not."""
        name, times = self._refused
        waits = name == request_id and self.is_idle and not len(self.jobs)
        self._refused = request_id, times + 1 if waits else 0
        return waits and times >= self.settings.num_batches

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockTables, num_external_tokens: int
    ) -> LoadJob | None:
        """Plan the load of ``num_external_tokens`` into the request's blocks (per KV cache group).
        ``None``: no load was offered. Side effects belong in :meth:`load_planned`: vLLM counts on
        a load inside the step even if a side effect raises."""
        state = self.book.get(request.request_id)
        if state is None or state.load.end is None or state.load.job is not None:
            return None
        return self._loads.plan(state, block_ids, num_external_tokens, self.in_use)

    def load_planned(self, request: Request, job: LoadJob, num_external_tokens: int) -> None:
        """Hand ``job`` to the workers."""
        self._ask_until.pop(request.request_id, None)
        self._refused = ("", 0)
        state = self.book.states[request.request_id]
        self._loads.planned(state, job, num_external_tokens)
        self._start(state, job)
        if job.in_step:
            self.witness.loaded(state, job, len(job.keys))
            left = request.num_tokens - state.load.offered_from - num_external_tokens
            self._begins(request, left)

    def on_scheduled_to_compute(self, request: Request) -> None:
        """vLLM has scheduled the request without a load, or after its load."""
        self._ask_until.pop(request.request_id, None)
        self._begins(request, request.num_tokens - request.num_computed_tokens)

    def _begins(self, request: Request, num_tokens: int) -> None:
        """``num_tokens`` of the request remain to compute."""
        self._to_compute.pop(request.request_id, None)
        self.transfers.drop_source(request.request_id)
        self.policy.request_admitted(request.request_id, num_tokens)

    def exclude_from_loads(self, request: Request) -> None:
        """Offer the request no load until it runs: its load failed, and the blocks that vLLM
        reserves for such requests may leave too few to admit a further load."""
        self._to_compute[request.request_id] = request

    def fetched_hit_tokens(self, request: Request) -> int:
        """How many tokens of the request's last planned load were not in memory."""
        state = self.book.get(request.request_id)
        return state.load.fetched_tokens if state is not None else 0

    @property
    def is_idle(self) -> bool:
        """Whether all requests of the last plan have finished."""
        return not self._scheduled

    # -- plan ----------------------------------------------------------------------------------

    def build_plan(self, scheduler_output: SchedulerOutput) -> StepPlan | None:
        """Everything planned since the last step, and the stores that this step makes possible;
        ``None``: nothing to tell. Attributes are checked before each call, to save time."""
        if scheduler_output.preempted_req_ids:
            self.in_use.mark_all_in_use()
        if self.in_use.changes:
            self.in_use.next_step()
        for request_id in scheduler_output.preempted_req_ids or ():
            if (state := self.book.get(request_id)) is not None:
                self.auditor.drop(state)
                state.restart()
        if (
            scheduler_output.scheduled_new_reqs
            or scheduler_output.scheduled_encoder_inputs
            or scheduler_output.free_encoder_mm_hashes
        ):
            self.book.step_planned(scheduler_output)
        if self.book.adapters.looks:
            self.book.adapters.next_step()
        leaks = self.settings.adapters_leak and self.book.leaks_adapters(scheduler_output)
        self._plan_stores(scheduler_output, leaks=leaks)
        scheduled = self._scheduled = set(scheduler_output.num_scheduled_tokens)
        if self._was_asked:
            self._was_asked = False
            self._wait.next_step()
        only_decodes = scheduler_output.total_num_scheduled_tokens == len(scheduled)
        work, left = (None, 0) if only_decodes else self._prefill_work(scheduler_output)
        # Loads inside the step add to its time, and vLLM starts all loads before the forward pass:
        # such a step is not timed.
        has_loads = scheduler_output.has_sync_kv_loads
        has_prefill = work is not None or has_loads
        self.policy.step_planned(len(scheduled), left, has_prefill=has_prefill)
        if probe := self.policy.probes.is_wanted and self.policy.probes.take():
            self.tally.count("probes")
        adapters, weights, transfers = self.book.adapters, self.book.weights, self.transfers
        plan = self.jobs.take_plan(
            (adapters.acked, weights.acked),
            idle=not scheduled and not self.settings.others_wait,
            prefill=work if not has_loads else None,
            probe=probe,
            uses=self._uses.take() if self._uses.new else (),
            adapter_question=adapters.take_question() if adapters.question else 0,
            weights_question=weights.take_question() if weights.question else 0,
            asks_again=weights.take_asks_again() if weights.asks_again else False,
            transfers=tuple(transfers.updates) if transfers.updates else (),
            acked_leaving=self.index.take_acked() if self.index.acked_leaving else (),
        )
        if transfers.updates:  # cleared only now, so that no failure loses them
            transfers.updates.clear()
        return plan

    def _plan_stores(self, scheduler_output: SchedulerOutput, *, leaks: bool) -> None:
        """Plan the stores and audits of the KV that a step computes."""
        if self.held.is_holding:
            self.held.next_step(is_crowded=self._was_asked)
        if self.witness.reused:
            self._cancel_overwritten()
        scheduled = scheduler_output.num_scheduled_tokens
        block_state = scheduler_output.kv_connector_block_state  # an empty step may have none
        offers = block_state.boundary_state_offloads if block_state is not None else {}
        max_len = self.settings.drafted_len
        is_drafted = max_len is None or _is_drafted(scheduler_output, max_len)
        for state in self.witness.due(scheduled, self.book.states, offers):
            self._plan_stores_of(state, scheduler_output, is_drafted=is_drafted, leaks=leaks)
        if self.held.is_holding:
            # Assume that the next step computes as many tokens.
            num_blocks = scheduler_output.total_num_scheduled_tokens // self._least_block
            self.held.unpin_for(self._num_groups * (num_blocks + len(scheduled)))

    def _plan_stores_of(
        self,
        state: RequestState,
        scheduler_output: SchedulerOutput,
        *,
        is_drafted: bool,
        leaks: bool,
    ) -> None:
        request_id = state.request.request_id
        block_state = scheduler_output.kv_connector_block_state
        num_tokens = scheduler_output.num_scheduled_tokens[request_id]
        is_own, is_sure = self.book.computes_its_own(state, num_tokens, leaks=leaks)
        num_own = num_tokens if is_own and is_drafted else 0
        is_sure &= self.settings.drafted_len is None  # with a limit, each step is checked
        may_be_more = self.witness.scheduled(state, num_own, is_sure=is_sure)
        offers = block_state.boundary_state_offloads.get(request_id, ())
        if not (may_be_more or offers):
            return
        num_tokens = state.witness.num_tokens or 0
        block_ids = partial(block_state.get_block_ids, request_id)
        snapshots = self._snapshots(state, offers)
        if self.settings.stores and (snapshots or self._stores.is_due(state, num_tokens)):
            self._plan_store(state, num_tokens, block_ids, snapshots)
            if state.transfer.stores:
                self.transfers.planned(state)
        if self.auditor.is_due(state, num_tokens):
            audit = self.auditor.plan(state, self.jobs.new_id(), block_ids)
            if audit is not None:
                self._start(state, audit)

    def _plan_store(
        self,
        state: RequestState,
        num_witnessed_tokens: int,
        resolve_block_ids: Callable[[], BlockTables],
        snapshots: Sequence[Snapshot] = (),
    ) -> None:
        job = self._stores.plan(state, num_witnessed_tokens, resolve_block_ids, snapshots)
        if job is not None:
            self._start(state, job)

    def _snapshots(self, state: RequestState, offers: Sequence[StateOffer]) -> list[Snapshot]:
        """Recurrent states at chunk ends, in parts for which vLLM offers the states of all
        groups."""
        blocks = self.witness.states(state, offers)
        size = self.settings.chunk_size
        return [
            Snapshot(number, end // size, tuple((blocks[group, end],) for group in part.groups))
            for end in sorted({num_tokens for _, num_tokens in blocks})
            for number, part in enumerate(self.settings.parts)
            if part.rule is Rule.STATE
            and end % size == 0
            and all((group, end) in blocks for group in part.groups)
        ]

    def _prefill_work(self, scheduler_output: SchedulerOutput) -> tuple[PrefillWork | None, int]:
        """The prompt tokens that a step computes, ``None`` if the step's duration says nothing
        about prefill speed; and those that it leaves to later steps."""
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduler_output.total_num_scheduled_tokens < len(scheduled) + MIN_PREFILL_TOKENS:
            return None, 0
        num_tokens, num_reads, num_left = 0, 0.0, 0
        for request_id, count in scheduled.items():
            if count == 1:
                continue
            state = self.book.get(request_id)
            if state is None:
                return None, 0  # a request that bypasses the cache
            context = state.request.num_computed_tokens
            if context < state.request.num_tokens - 1:  # else the tokens are speculative
                num_tokens += count
                num_reads += count * (context + count / 2)
                num_left += max(0, state.request.num_tokens - context - count)
        if num_tokens < MIN_PREFILL_TOKENS:
            return None, 0
        context = max(0, round(num_reads / num_tokens - num_tokens / 2))
        return PrefillWork(num_tokens, context), num_left

    # -- ended ---------------------------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: BlockTables, *, is_updating: bool = False
    ) -> tuple[bool, dict[str, Any] | None]:
        """Give the request's blocks back to vLLM; open stores read them until vLLM reuses them.
        ``is_updating``: during an update from a step's output; those blocks are then pinned until
        :meth:`take_events` at least. Returns True if vLLM must keep the blocks until all ranks have
        stored them for another instance, and the parameters for the router."""
        # If it still waits for a load, be it another connector's, vLLM itself keeps its blocks
        # until the load's end, and takes no second end.
        may_wait = request.status.name in _CUT_OFF and request.request_id not in self._scheduled
        self._scheduled.discard(request.request_id)
        self._ask_until.pop(request.request_id, None)
        self._to_compute.pop(request.request_id, None)
        self.spans.drop(request, "lookup")
        self.policy.request_ended(request.request_id, len(self._scheduled))
        self.in_use.freed(block_ids)
        if (state := self.book.finish(request)) is not None:
            self._store_the_rest(state, block_ids)
            self.witness.ended(state, block_ids)
        if self.is_idle:  # whoever steps the engine may reset the cache next
            self.held.unpin_all()
        stores = self.jobs.stores_of(state) if state is not None else {}
        for job_id, read_ids in stores.items() if is_updating else ():
            self.held.pin_ended(job_id, read_ids)
        return self.transfers.finished(request, state, block_ids, stores, is_held=not may_wait)

    def _store_the_rest(self, state: RequestState, block_ids: BlockTables) -> None:
        """Store what remains of a finished request; if its load is open, only cancel that."""
        self.auditor.drop(state)
        request = state.request
        if state.load.job is not None:
            # vLLM itself keeps the blocks of an aborted load until the load is reported.
            self.jobs.cancel_load(state.load.job)
        elif self.settings.stores:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            num_tokens = self.witness.finished(state, computed)
            self._plan_store(state, num_tokens, lambda: block_ids, self._snapshots(state, ()))

    def take_events(self) -> Sequence[KvEvent]:
        """KV events since the last call. Ends pins, because vLLM has processed the step's output,
        and whoever steps the engine may reset the cache next."""
        if self.held.is_holding:
            self.held.end_update(is_idle=self.is_idle)
        return self.kv_events.take() if self.kv_events.untaken else ()

    def will_free_blocks(self) -> bool:
        """vLLM found too few free blocks: whether to wait one step instead of preempting."""
        return self.held.should_wait()

    @property
    def has_unattended_jobs(self) -> bool:
        """Whether the engine must keep stepping: for jobs that no request waits for, updates of KV
        transfers, or the weights after a reset."""
        is_asked_for = self.book.weights.is_asked_for
        return self.jobs.has_unattended or is_asked_for or bool(self.transfers.updates)

    def update_from_reports(self, reports: Sequence[RankReport]) -> list[ShortLoad]:
        """Process one step's reports of all ranks. Returns the loads that ended incomplete."""
        for report in reports:  # first: workers rely on this even if a later call raises
            self.index.apply(report.rank, report.events, report.num_leaving)
        if self.book.start.hasher is None:
            self.policy.observe_measured(self.book.start.update(reports))
        self.policy.observe_reports(reports)
        short_loads: list[ShortLoad] = []
        for report in reports:
            if self.kv_events.is_wanted:
                self.kv_events.apply(report)
            if report.start is not None:
                self.book.weights.watch(report.rank, report.start.changes_at)
            if report.adapters is not None:
                self._learn_adapters(report.rank, report.adapters)
            if report.weights is not None and self.book.weights.learn(report.rank, report.weights):
                self._drop_unsent_stores()
                self.book.forget_encoded()
                self._doubt_weights()
            for result in report.results:
                short_loads += self._apply_result(report.rank, result)
        if not self.book.weights.name:
            self._name_weights()
        return short_loads

    def take_metrics(self) -> Samples | None:
        """Samples for ``/metrics`` since the last call; ``None`` if there are none, or if they can
        wait. They cannot when idle, because there may be no next step."""
        now = self.clock()
        if now < self._samples_at and not self.is_idle:
            return None
        self._samples_at = now + _SAMPLES_SECONDS
        if self.hits.lookup is not None:
            self.hits.lookup.report(self.tally)
        return self.tally.take()

    def before_reset(self) -> None:
        """vLLM is about to reset its prefix cache, as trainers request after changing the weights:
        nothing is stored or loaded until all ranks have read their weights again. O(requests in
        flight)."""
        self.in_use.mark_all_in_use()
        self.book.weights.reset(is_external=False)
        self._doubt_weights()

    def reset_cache(self) -> None:
        """The user resets this connector too; a label may then name the weights. Chunks stored
        under the current weights remain hits."""
        self.book.weights.reset(is_external=True)
        self._doubt_weights()

    def shutdown(self) -> None:
        self.hits.close()
        self.book.close()
        self.transfers.close()

    # -- jobs ----------------------------------------------------------------------------------

    def _start(self, state: RequestState, job: LoadJob | StoreJob) -> None:
        """Hand the job to the workers with the next plan."""
        is_told = self.kv_events.is_wanted and self.book.has_current_keys(state)
        for run in job.runs if is_told else ():
            if run.part == 0:  # one event per chunk, not per part
                describe = partial(self._describe, state, run)
                keys = run.keys[:-1] if run.tail_tokens else run.keys  # routers look for no tails
                self.kv_events.describe(keys, job.job_id, describe)
        self.auditor.learn(job)
        if self.spans.is_on:
            self.spans.begin(state.request, span_name(job))
        self.jobs.add(state, job)
        if isinstance(job, StoreJob):
            self.held.pin_passing(job)
            if not isinstance(job, AuditJob):  # no load waits for one
                self.policy.stores.planned(job.job_id)

    def _describe(self, state: RequestState, run: PartRun, index: int) -> BlockRun:
        sizes = self.settings.chunk_size, self.witness.hash_block_size
        shared = self.book.is_shared(state)
        return describe_chunk(
            state.request, run.chunks[index], state.keys.keys, *sizes, shared=shared
        )

    def _abandon(self, states: Iterable[RequestState]) -> None:
        """Cancel loads and audits of requests whose keys have changed or are void."""
        for state in states:
            if state.load.job is not None:
                self.jobs.cancel_load(state.load.job)
            self.auditor.drop(state)

    def _drop_unsent_stores(self) -> None:
        """Drop stores that might read KV of other weights than their keys name: vLLM announces the
        end of a request before it passes on the ranks' reports of the same step."""
        for planned in self.jobs.drop_unsent_stores():
            self.index.settle(planned.job.keys, planned.job.job_id)
            self._end(planned)

    def _cancel_overwritten(self) -> None:
        """Cancel stores of reused blocks: the step being planned overwrites these."""
        if reused := self.witness.take_reused():
            for planned in self.jobs.vacate(reused):
                self.index.settle(planned.job.keys, planned.job.job_id)  # no hits from now on
                if not self.jobs.is_open(planned.job.job_id):
                    self._end(planned)

    def _apply_result(self, rank: int, result: JobResult) -> list[ShortLoad]:
        """Apply one rank's result of one job. Returns the job's load if it has ended incomplete."""
        if result.job_id < self.jobs.first_id:
            return []
        planned, has_ended = self.jobs.report(result)
        if isinstance(planned.job, LoadJob) and result.outcome is Outcome.MISSING:
            key = planned.job.keys[result.num_chunks]
            planned.state.lookup.lose(key)
            if any(each.lacks_next for each in result.fetched if each.tier is Tier.REDIS):
                self.kv_events.gone(Tier.REDIS, rank, key)
        return self._end(planned) if has_ended else []

    def _end(self, planned: PlannedJob) -> list[ShortLoad]:
        state, job, short = planned.state, planned.job, None
        self.held.ended(job.job_id)
        if self.spans.is_on:
            self.spans.end(state.request, span_name(job), planned.span_attributes())
        if isinstance(job, LoadJob) and job.in_step:
            self.policy.observe_load(planned.results)
        elif isinstance(job, LoadJob):
            self.transfers.drop_source(job.request_id)
            if job.source is None or job.source.is_trusted:
                self.witness.loaded(state, job, planned.num_chunks)
            short = self._loads.ended(state, job, planned.num_chunks, planned.results)
        elif isinstance(job, AuditJob):
            if (root := self.auditor.ended(state, job, planned.results)) is not None:
                self.kv_events.clear()  # of all roots: mismatches are rare
                self.witness.invalidate_all()
                self._abandon(self.book.separate(root, self.jobs.states))
        else:
            seconds = [each.waited_seconds + each.seconds for each in planned.results]
            self.policy.stores.ended(job.job_id, seconds)
            self._stores.ended(job, planned.results)
        if self.kv_events.is_wanted:
            self.kv_events.settle(job.keys, job.job_id)
        return [short] if short is not None else []

    # -- weights and adapters ------------------------------------------------------------------

    def _doubt_weights(self) -> None:
        """The weights may have changed: trust no KV computed so far, and drop all requests."""
        self.auditor.doubt()
        self.witness.forget()
        self.held.unpin_all()
        self._abandon(self.book.drop_all())

    def _name_weights(self) -> None:
        weights, start = self.book.weights, self.book.start
        if start.hasher is None or not weights.settle(start.configuration):
            return
        if (before := self.book.epochs.name) != weights.name:
            self.book.rename(weights.name)
            if before:
                self.auditor.forget()
                self.kv_events.clear()

    def _learn_adapters(self, rank: int, adapters: LoadedAdapterList) -> None:
        self.witness.recheck_next_step(self.book.states.values())
        if doubtful := self.book.adapters.update(rank, adapters):
            self.witness.forget()
            for state in self.book.of_adapters(doubtful):
                self.witness.break_off(state)


def _is_drafted(scheduler_output: SchedulerOutput, max_len: int) -> bool:
    """Whether the drafter runs in this step: it runs for all requests or for none."""
    new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {request.req_id: request.num_computed_tokens for request in new}
    scheduled = scheduler_output.num_scheduled_tokens
    return all(starts[name] + count <= max_len for name, count in scheduled.items())
