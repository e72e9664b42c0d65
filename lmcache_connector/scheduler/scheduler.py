"""The scheduler side: finds hits, plans load and store jobs, learns how they ended.

Token ranges of one request, chunks of ``chunk_size`` tokens::

    |-- vLLM has these --|------ hit, loaded ------|-- computed --|
    0            num_computed                  hit end        num_tokens
              first chunk ^ may begin inside a chunk

One :class:`RequestState` per request holds everything known about it, and outlives the request
while store jobs still read what were its blocks. The request book owns which there are, and under
which keys; the hit finder, the load planner, the block witness, the store planner and the auditor
each own a part of every state. The scheduler calls them in vLLM's order. Runs on the engine's
scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.cost_model.prefill import MIN_PREFILL_TOKENS
from lmcache_connector.kv_events.log import KvEvent, KvEventLog
from lmcache_connector.kv_parts.blocks import BlocksInUse
from lmcache_connector.kv_parts.part import Rule, keys_of_part
from lmcache_connector.lookup.background_lookup import PENDING
from lmcache_connector.lookup.chunk_index import ChunkIndex, PrefixUses, WantedChunks
from lmcache_connector.lookup.hit_finder import FetchAhead, HitFinder
from lmcache_connector.metrics.samples import Samples, Tally
from lmcache_connector.plans import (
    LoadedAdapterList,
    LoadJob,
    PrefillWork,
    RankReport,
    StepPlan,
)
from lmcache_connector.requests.adapters import LoadedAdapters
from lmcache_connector.requests.identifier import UNREAD, NotYet
from lmcache_connector.scheduler.auditor import Auditor
from lmcache_connector.scheduler.block_witness import BlockWitness
from lmcache_connector.scheduler.dispatcher import JobDispatcher
from lmcache_connector.scheduler.held_blocks import HeldBlocks
from lmcache_connector.scheduler.jobs import PlannedJobs
from lmcache_connector.scheduler.load_planner import LoadPlanner
from lmcache_connector.scheduler.metrics import SchedulerMetrics
from lmcache_connector.scheduler.prefetcher import Prefetcher
from lmcache_connector.scheduler.request_book import RequestBook
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings
from lmcache_connector.scheduler.store_planner import Snapshot, StorePlanner
from lmcache_connector.scheduler.transfers import Transfers
from lmcache_connector.scheduler.unseen_changes import UnseenChanges
from lmcache_connector.threads import StepWait
from lmcache_connector.tracing.spans import Spans
from lmcache_connector.vllm_compat.short_loads import ShortLoad

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request, SchedulerOutput

_ASK_AGAIN_SECONDS = 10.0
"""After its first ask for a hit a request is computed, whatever it still waits for."""


@dataclass(eq=False)
class Scheduler:
    """Maps vLLM's scheduler-side connector calls onto plans.

    ``kv_events`` is told what the tiers take in and let go, ``wanted`` what prompts ask for,
    ``loaded_adapters`` what the ranks have loaded, ``spans`` what begins and ends for a request.
    """

    settings: SchedulerSettings
    book: RequestBook
    index: ChunkIndex
    hits: HitFinder
    policy: LoadPolicy
    kv_events: KvEventLog
    tally: Tally
    metrics: SchedulerMetrics
    auditor: Auditor
    loaded_adapters: LoadedAdapters
    wanted: WantedChunks | None
    transfers: Transfers
    spans: Spans = field(default_factory=Spans)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.witness = BlockWitness(self.settings)
        self._unseen = UnseenChanges(self.settings.world_size)
        self._num_groups = sum(len(part.groups) for part in self.settings.parts)
        self._least_block = min(part.block_size for part in self.settings.parts)
        self._to_compute: dict[str, Request] = {}
        self._refused = ("", 0)  # the request whose load vLLM did not take, and how often
        self._begin(PlannedJobs(self.settings.world_size))

    def _begin(self, jobs: PlannedJobs) -> None:
        """With no request and no job."""
        settings, policy, tally = self.settings, self.policy, self.tally
        self.jobs = jobs
        self.held = HeldBlocks(settings, self.witness)
        self.in_use = BlocksInUse(settings.num_batches, is_told=settings.is_prefix_only)
        self._uses = PrefixUses(settings.parts, self.index)
        self._loads = LoadPlanner(settings, self.index, policy, tally, jobs.new_id)
        self._stores = StorePlanner(settings, self.index, tally, jobs.new_id)
        self.prefetcher = Prefetcher(settings, policy, tally, jobs.new_id, self.index)
        self._dispatcher = JobDispatcher(
            settings,
            self.book,
            self.index,
            policy,
            jobs,
            self._loads,
            self._stores,
            self.prefetcher,
            self.auditor,
            self.witness,
            self.held,
            self.kv_events,
            self.spans,
            self.transfers,
        )
        # Requests in the last plan that have not finished since.
        self._scheduled: set[str] = set()
        self._was_asked = False  # for hits, since the last plan
        self._wait = StepWait(settings.step_wait_seconds, self.clock)
        self._ask_until: dict[str, float] = {}  # by request that vLLM was told to ask for again

    def start_over(self) -> None:
        """A call has raised, and what it has left half done is not known. Forget all requests and
        jobs: the workers are to cancel theirs. Requests in flight bypass from now on, blocks are
        vLLM's again, and nothing computed until now counts. What the tiers hold, what was measured,
        and whose keys a root has stays."""
        self.witness.forget_all()
        self.book.forget_all()
        self.auditor.forget_all()
        self.loaded_adapters.forget()
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
        """Hash the prompt and ask Redis at once: the answer is there when it is scheduled."""
        self.policy.request_arrived(request.request_id)
        self.transfers.arrived(request)
        self._enter(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond ``num_computed_tokens``, and whether that is done
        between steps; ``None``: ask again in the next step."""
        self._was_asked = True
        if not self.is_idle:
            # While others run, a request that waits may wait for a store to have read its blocks.
            self.held.delay_free_for_stores(self.jobs)
        if request.skip_reading_prefix_cache or request.request_id in self._to_compute:
            return 0, False
        num_tokens = self._find(request, num_computed_tokens)
        if num_tokens is None:
            if self.transfers.is_coming(request.request_id):
                return None, False
            now = self.clock()
            if now < self._ask_until.setdefault(request.request_id, now + _ASK_AGAIN_SECONDS):
                self.prefetcher.is_next(request.request_id)
                return None, False
            num_tokens = 0
        if num_tokens and self._will_never_be_taken(request.request_id):
            num_tokens = 0
        self.spans.end(request, "lookup", {"hit_tokens": num_tokens})
        state = self.book.get(request.request_id)
        return num_tokens, num_tokens > 0 and not (state is not None and state.load.in_step)

    def _enter(
        self, request: Request, wait: StepWait | None = None
    ) -> RequestState | Literal[NotYet.UNREAD] | None:
        known = self.book.get(request.request_id)
        state = self.book.enter(request, wait)
        if not isinstance(state, RequestState) or state is known:
            return state
        if self.wanted:
            num_parts = len(self.settings.parts)
            for part in range(num_parts):
                self.wanted.sight(keys_of_part(state.keys.keys, part, num_parts))
        self._uses.add(state.keys.keys, state.claim)
        if self.settings.loads and not request.skip_reading_prefix_cache:
            self.spans.begin(request, "lookup")
            self.hits.ask(state.lookup, first=0)
            if not self.transfers.is_coming(request.request_id):
                self.prefetcher.queued(state)
        return state

    def _find(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens can be loaded after the computed ones; ``None``: ask again."""
        self._wait.is_idle = self.is_idle
        wait = self._wait if self.is_idle else None
        state = self._enter(request, wait)
        is_current = self.book.is_current(request, wait)
        if state is UNREAD or is_current is UNREAD:
            # Even if it will load nothing: what is computed before it has a name is not stored.
            return None
        if state is None or not is_current:
            return 0
        if not (self.settings.loads and state.load.is_allowed):
            return 0
        self._dispatcher.cancel_overwritten()
        if self.transfers.find(state, num_computed_tokens, self._wait) is PENDING:
            return None
        hit = self.hits.find(state.lookup, num_computed_tokens, self._wait)
        if state.source is not None and hit is not PENDING:
            elsewhere = self.hits.find_ahead(state.lookup, num_computed_tokens)
            if isinstance(elsewhere, FetchAhead) and elsewhere.stop > hit.stop:
                self.transfers.turn_down(state)
                hit = self.hits.find(state.lookup, num_computed_tokens, self._wait)
        if hit is PENDING:
            return None
        self._stores.found(state, hit)
        if not state.transfer.loads:  # it is loaded to the end, or to no purpose
            hit = self.auditor.cut(state, num_computed_tokens, hit)
        return self._loads.offer(
            state, num_computed_tokens, hit, may_be_in_step=self._unseen.are_excluded()
        )

    def _will_never_be_taken(self, request_id: str) -> bool:
        """Whether vLLM has refused to load for the request while nothing ran that frees blocks. It
        keeps blocks free for whoever had a load that came to nothing, and those may wait behind
        this one. To compute, it needs no more than there is."""
        name, times = self._refused
        waits = name == request_id and self.is_idle and not len(self.jobs)
        self._refused = request_id, times + 1 if waits else 0
        return waits and times >= self.settings.num_batches

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> LoadJob | None:
        """Plan the load of ``num_external_tokens`` into the request's blocks, listed per KV cache
        group. ``None``: it was not offered. What else there is to do is up to
        :meth:`load_planned`: vLLM counts on a load inside the step, whatever comes of that."""
        state = self.book.get(request.request_id)
        if state is None or state.load.end is None or state.load.job is not None:
            return None
        return self._loads.plan(state, block_ids, num_external_tokens, self.in_use)

    def load_planned(self, request: Request, job: LoadJob, num_external_tokens: int) -> None:
        """The load is made."""
        self._ask_until.pop(request.request_id, None)
        self._refused = ("", 0)
        state = self.book.states[request.request_id]
        self._loads.planned(state, job, num_external_tokens)
        self._dispatcher.stop_prefetch(state, frozenset(job.keys))
        self._dispatcher.start(state, job)
        if job.in_step:
            self.witness.loaded(state, job, len(job.keys))
            left = request.num_tokens - state.load.offered_from - num_external_tokens
            self._begins(request, left)

    def admitted(self, request: Request) -> None:
        """The step being planned computes of the request, unless it is waiting for its load."""
        self._ask_until.pop(request.request_id, None)
        self._begins(request, request.num_tokens - request.num_computed_tokens)
        if (state := self.book.get(request.request_id)) is not None:
            self._dispatcher.stop_prefetch(state)

    def _begins(self, request: Request, num_tokens: int) -> None:
        """``num_tokens`` of it are left to compute."""
        self._to_compute.pop(request.request_id, None)
        self.transfers.let_go(request.request_id)
        self.policy.request_admitted(request.request_id, num_tokens)

    def compute(self, request: Request) -> None:
        """Offer the request no load until it has begun: it had one that came to nothing, and what
        vLLM keeps free while it admits loads may be more than there is for another."""
        self._to_compute[request.request_id] = request

    def fetched_hit_tokens(self, request: Request) -> int:
        """Of the load planned last for this request: tokens that memory lacked."""
        state = self.book.get(request.request_id)
        return state.load.fetched_tokens if state is not None else 0

    @property
    def is_idle(self) -> bool:
        """Whether all requests of the last plan have finished."""
        return not self._scheduled

    # -- plan ----------------------------------------------------------------------------------

    def build_plan(self, scheduler_output: SchedulerOutput) -> StepPlan | None:
        """Everything planned since the last step, and the stores this step makes possible.

        ``None``: neither. What could be asked here is looked at first: a call takes longer.
        """
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
        self._plan_stores(scheduler_output)
        if self.prefetcher.waiting:
            for state, job in self.prefetcher.plan(self.hits):
                self._dispatcher.start(state, job)
        scheduled = self._scheduled = set(scheduler_output.num_scheduled_tokens)
        if self._was_asked:
            self._was_asked = False
            self._wait.next_step()
        only_decodes = scheduler_output.total_num_scheduled_tokens == len(scheduled)
        work = self._prefill_work(scheduler_output) if not only_decodes else None
        left = self._prompt_tokens_left(scheduler_output) if work is not None else 0
        # Where loads are made inside the step, they are part of its time, and vLLM starts all loads
        # before its forward pass: that is not timed.
        has_loads = scheduler_output.has_sync_kv_loads
        has_prefill = work is not None or has_loads
        self.policy.step_planned(len(scheduled), left, has_prefill=has_prefill)
        if probe := self.policy.probes.is_wanted and self.policy.probes.take():
            self.tally.count("probes")
        adapters, weights, transfers = self.loaded_adapters, self.book.weights, self.transfers
        plan = self.jobs.take_plan(
            (adapters.heard, weights.heard),
            idle=not scheduled,
            prefill=work if not has_loads else None,
            probe=probe,
            wanted=self.wanted.take() if self.wanted and self.wanted.has_news else (),
            uses=self._uses.take() if self._uses.new else (),
            unwanted=self.prefetcher.take_unwanted() if self.prefetcher.unwanted else (),
            adapter_question=adapters.take_question() if adapters.question else 0,
            weights_question=weights.take_question() if weights.question else 0,
            transfers=tuple(transfers.updates) if transfers.updates else (),
            heard_leaving=self.index.take_heard() if self.index.heard_leaving else (),
        )
        if transfers.updates:  # they are on their way: no failure has lost them
            transfers.updates.clear()
        return plan

    def _plan_stores(self, scheduler_output: SchedulerOutput) -> None:
        """The stores and audits that a step makes possible by what it computes."""
        if self.held.is_holding:
            self.held.next_step()
        if self.witness.reused:
            self._dispatcher.cancel_overwritten()
        scheduled = scheduler_output.num_scheduled_tokens
        block_state = scheduler_output.kv_connector_block_state  # an empty step may have none
        offers = block_state.boundary_state_offloads if block_state is not None else {}
        max_len = self.settings.drafted_len
        is_drafted = max_len is None or _is_drafted(scheduler_output, max_len)
        for state in self.witness.due(scheduled, self.book.states, offers):
            self._plan_stores_of(state, scheduler_output, is_drafted=is_drafted)
        if self.held.is_holding:
            # Should the next step compute as much.
            num_blocks = scheduler_output.total_num_scheduled_tokens // self._least_block
            self.held.unpin_for(self._num_groups * (num_blocks + len(scheduled)))

    def _plan_stores_of(
        self, state: RequestState, scheduler_output: SchedulerOutput, *, is_drafted: bool
    ) -> None:
        request_id = state.request.request_id
        block_state = scheduler_output.kv_connector_block_state
        num_tokens = scheduler_output.num_scheduled_tokens[request_id]
        is_own, is_sure = self.book.computes_its_own(state, num_tokens)
        num_own = num_tokens if is_own and is_drafted else 0
        is_sure &= self.settings.drafted_len is None  # else every step decides
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
                self._dispatcher.start(state, audit)

    def _plan_store(
        self,
        state: RequestState,
        num_witnessed_tokens: int,
        resolve_block_ids: Callable[[], Sequence[Sequence[int]]],
        snapshots: Sequence[Snapshot] = (),
    ) -> None:
        job = self._stores.plan(state, num_witnessed_tokens, resolve_block_ids, snapshots)
        if job is not None:
            self._dispatcher.start(state, job)

    def _snapshots(
        self, state: RequestState, offers: Sequence[tuple[int, int, int]]
    ) -> list[Snapshot]:
        """The states that the step being planned computes: group, block, and after how many tokens.
        Each where a chunk ends, and whole: vLLM offers those of all groups of a part."""
        blocks = {
            (group, num_tokens): block
            for group, block, num_tokens in offers
            if self.witness.computes_state(state, group, block, num_tokens)
        }
        size = self.settings.chunk_size
        return [
            Snapshot(number, end // size, tuple((blocks[group, end],) for group in part.groups))
            for end in sorted({num_tokens for _, num_tokens in blocks})
            for number, part in enumerate(self.settings.parts)
            if part.rule is Rule.STATE
            and end % size == 0
            and all((group, end) in blocks for group in part.groups)
        ]

    def _prefill_work(self, scheduler_output: SchedulerOutput) -> PrefillWork | None:
        """The prompt tokens that a step computes; ``None`` if its duration would teach nothing of
        what recompute costs."""
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduler_output.total_num_scheduled_tokens < len(scheduled) + MIN_PREFILL_TOKENS:
            return None
        num_tokens, num_reads, num_prompts = 0, 0.0, 0
        for request_id, count in scheduled.items():
            if count == 1:
                continue
            state = self.book.get(request_id)
            if state is None:
                return None  # a request that bypasses the cache
            context = state.request.num_computed_tokens
            if context < state.request.num_tokens - 1:  # else it is speculation
                num_tokens += count
                num_reads += count * (context + count / 2)
                num_prompts += 1
        if num_tokens < MIN_PREFILL_TOKENS:
            return None
        context = max(0, round(num_reads / num_tokens - num_tokens / 2))
        return PrefillWork(num_tokens, context, len(scheduled) - num_prompts)

    def _prompt_tokens_left(self, scheduler_output: SchedulerOutput) -> int:
        """Of the prompts in a step, what it leaves to later steps."""
        left = 0
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            if count > 1 and (state := self.book.get(request_id)) is not None:
                request = state.request
                left += max(0, request.num_tokens - request.num_computed_tokens - count)
        return left

    # -- ended ---------------------------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]], *, is_updating: bool = False
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks go back to vLLM at once: stores read them until vLLM hands them out again.
        If vLLM ``is_updating`` from a step's output, they are kept until :meth:`take_events`, to be
        handed out last. True: they are kept until the ranks have told that they were read, for
        another instance. With it come parameters for the router."""
        self._scheduled.discard(request.request_id)
        self._ask_until.pop(request.request_id, None)
        self._to_compute.pop(request.request_id, None)
        self.spans.drop(request, "lookup")
        self.policy.request_ended(request.request_id, len(self._scheduled))
        self.in_use.freed(block_ids)
        if (state := self.book.finish(request)) is not None:
            self._store_the_rest(state, block_ids)
        if self.is_idle:  # a user who steps the engine may reset it next
            self.held.unpin_all()
        if state is not None and is_updating:
            self.held.delay_free(self.jobs.blocks_read_of(state))
        return self.transfers.finished(request, state, block_ids)

    def _store_the_rest(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> None:
        """Of a request that has ended. Nothing more is loaded for it."""
        self.auditor.drop(state)
        self._dispatcher.stop_prefetch(state)
        request = state.request
        if state.load.job is not None:
            # vLLM itself keeps the blocks of an aborted load until it is reported.
            self.jobs.cancel_load(state.load.job)
        elif self.settings.stores:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            self._plan_store(state, self.witness.finished(state, computed), lambda: block_ids)
        self.book.forget_if_done(state)

    def take_events(self) -> Sequence[KvEvent]:
        """What the tiers took in and let go since the last call. vLLM has seen to all that a step
        has brought."""
        if self.held.is_holding:
            self.held.free_delayed()
        return self.kv_events.take() if self.kv_events.has_news else ()

    def will_free_blocks(self) -> bool:
        """A step has found no free blocks: whether it does better to wait than to preempt."""
        return self.held.will_free()

    @property
    def has_unattended_jobs(self) -> bool:
        """Whether steps must go on, for a job to be reported that no request waits for, or for the
        weights after a reset."""
        is_asked_for = self.book.weights.is_asked_for
        return self.jobs.has_unattended or is_asked_for or bool(self.transfers.updates)

    def update_from_reports(self, reports: Sequence[RankReport]) -> list[ShortLoad]:
        """``reports``: of all ranks that had something to report in one step. Returns the loads
        that have ended with it and did not bring everything."""
        for report in reports:  # whatever raises below: a rank may rely on having been heard
            self.index.apply(report.rank, report.events, report.num_leaving)
        if self.book.start.hasher is None:
            self.policy.calibrate(self.book.start.update(reports))
        self.policy.observe_reports(reports)
        short_loads: list[ShortLoad] = []
        for report in reports:
            self.kv_events.apply(report)
            if report.adapters is not None:
                self._learn_adapters(report.rank, report.adapters)
            if report.weights is not None and self.book.weights.learn(report.rank, report.weights):
                self._dispatcher.drop_unsent_stores()
                self.book.forget_encoded()
                self._doubt_weights()
            for result in report.results:
                short_loads += self._dispatcher.report(report.rank, result)
        if not self.book.weights.name:
            self._name_weights()
        for report in reports:
            self._unseen.learn(report)
        return short_loads

    def take_metrics(self) -> Samples | None:
        """What there is to tell ``/metrics`` since the last call; ``None`` if nothing is."""
        return self.metrics.take(is_idle=not self._scheduled)

    def before_reset(self) -> None:
        """vLLM is about to reset its prefix cache. Trainers have it do so when they have changed
        the weights: until all ranks have read theirs, nothing is stored or loaded. O(requests in
        flight)."""
        self.in_use.mark_all_in_use()
        self.book.weights.reset(is_external=False)
        self._doubt_weights()

    def reset_cache(self) -> None:
        """The user asks for a reset of this connector too: what weights have changed may be named
        by a label. What is stored of the weights in memory stays a hit."""
        self.book.weights.reset(is_external=True)
        self._doubt_weights()

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless nothing is left over once all requests are gone."""
        assert len(self.book) == 0, f"{len(self.book)} requests left"
        assert len(self.jobs) == 0, f"{len(self.jobs)} jobs left"
        assert self.index.num_planned == 0, "planned chunks left"
        self.prefetcher.check_integrity()
        assert not self.held.num_pins, "pins left"
        assert not self._ask_until, "asks left"
        assert not self._to_compute, "requests left to compute"
        assert len(self.transfers) == 0, "KV transfers left"

    def shutdown(self) -> None:
        self.hits.close()
        self.book.close()
        self.transfers.close()

    # -- weights and adapters ------------------------------------------------------------------

    def _doubt_weights(self) -> None:
        """What is computed from now on may be of other weights."""
        self.auditor.doubt()
        self.witness.forget()
        self.held.unpin_all()
        self._dispatcher.abandon(self.book.drop_all())

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
        self.witness.look_again(self.book.states.values())
        if doubtful := self.loaded_adapters.update(rank, adapters):
            self.witness.forget()
            for state in self.book.of_adapters(doubtful):
                self.witness.break_off(state)


def _is_drafted(scheduler_output: SchedulerOutput, max_len: int) -> bool:
    """Whether the model's drafter computes the step's tokens too: for all requests together, or for
    none."""
    new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {request.req_id: request.num_computed_tokens for request in new}
    scheduled = scheduler_output.num_scheduled_tokens
    return all(starts[name] + count <= max_len for name, count in scheduled.items())
