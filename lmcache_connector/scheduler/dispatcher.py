"""From a request's blocks to its jobs, and from the ranks' results back to its state.

The load planner, the store planner and the auditor each say what a job of theirs is; here it is
started, handed to the workers, and ended. Whoever must hear of that is told here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmcache_connector.kv_events.log import BlockRun, KvEventSink
from lmcache_connector.kv_events.vllm_events import describe_chunk
from lmcache_connector.kv_parts.blocks import BlocksInUse
from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.lookup.hit_finder import HitFinder
from lmcache_connector.plans import (
    AuditJob,
    JobResult,
    LoadJob,
    Outcome,
    PartRun,
    PrefetchJob,
    StoreJob,
    Tier,
)
from lmcache_connector.scheduler.auditor import Auditor
from lmcache_connector.scheduler.block_witness import BlockWitness
from lmcache_connector.scheduler.held_blocks import HeldBlocks
from lmcache_connector.scheduler.jobs import PlannedJob, PlannedJobs
from lmcache_connector.scheduler.load_planner import LoadPlanner
from lmcache_connector.scheduler.prefetcher import Prefetcher
from lmcache_connector.scheduler.request_book import RequestBook
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings
from lmcache_connector.scheduler.store_planner import Snapshot, StorePlanner
from lmcache_connector.scheduler.transfers import Transfers
from lmcache_connector.tracing.spans import Spans
from lmcache_connector.vllm_compat.short_loads import ShortLoad

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import SchedulerOutput


class JobDispatcher:
    """Starts and ends all jobs. ``kv_events`` is told what they may bring to the tiers, ``spans``
    when they start and end."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        book: RequestBook,
        index: ChunkIndex,
        jobs: PlannedJobs,
        loads: LoadPlanner,
        stores: StorePlanner,
        prefetcher: Prefetcher,
        auditor: Auditor,
        witness: BlockWitness,
        kv_events: KvEventSink,
        spans: Spans,
        transfers: Transfers,
    ) -> None:
        self._transfers = transfers
        self._settings = settings
        self._book = book
        self._index = index
        self._jobs = jobs
        self._loads = loads
        self._stores = stores
        self._prefetcher = prefetcher
        self._auditor = auditor
        self._witness = witness
        self._kv_events = kv_events
        self._spans = spans
        self._short_loads: list[ShortLoad] = []
        self.held = HeldBlocks(settings, witness)
        self._num_groups = sum(len(part.groups) for part in settings.parts)
        self._least_block = min(part.block_size for part in settings.parts)
        self.in_use = BlocksInUse(settings.num_batches, is_told=settings.is_prefix_only)

    # -- planning ------------------------------------------------------------------------------

    def plan_load(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> None:
        """Of ``num_tokens`` into the request's blocks, listed per KV cache group."""
        job = self._loads.plan(state, block_ids, num_tokens, self.in_use)
        self.stop_prefetch(state, frozenset(job.keys))
        self._start(state, job)

    def plan_prefetches(self, hits: HitFinder) -> None:
        """For requests that the step being planned leaves in vLLM's queue."""
        for state, job in self._prefetcher.plan(hits):
            self._start(state, job)

    def stop_prefetch(self, state: RequestState, loaded: Collection[bytes] = ()) -> None:
        """The request does not wait any more. What it loads now is ``loaded``."""
        self._cancel(self._prefetcher.release(state, loaded))

    def plan_step(self, scheduler_output: SchedulerOutput) -> None:
        """The stores and audits that a step makes possible by what it computes."""
        if self.held.is_holding:
            self.held.next_step()
        if self._witness.reused:
            self.cancel_overwritten()
        scheduled = scheduler_output.num_scheduled_tokens
        block_state = scheduler_output.kv_connector_block_state  # an empty step may have none
        offers = block_state.boundary_state_offloads if block_state is not None else {}
        max_len = self._settings.drafted_len
        is_drafted = max_len is None or self._is_drafted(scheduler_output, max_len)
        for state in self._witness.due(scheduled, self._book.states, offers):
            self._plan_request(state, scheduler_output, is_drafted=is_drafted)
        if self.held.is_holding:
            # Should the next step compute as much.
            num_blocks = scheduler_output.total_num_scheduled_tokens // self._least_block
            self.held.make_room(self._num_groups * (num_blocks + len(scheduled)))

    def finish(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> None:
        """The request has ended: what is left of it to store is stored, nothing more is loaded."""
        self._auditor.drop(state)
        self.stop_prefetch(state)
        request = state.request
        if state.load.job is not None:
            # vLLM itself keeps the blocks of an aborted load until it is reported.
            self._jobs.cancel_load(state.load.job)
        elif self._settings.stores:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            self._plan_store(state, self._witness.finished(state, computed), lambda: block_ids)
        self._book.forget_if_done(state)

    def abandon(self, states: Iterable[RequestState]) -> None:
        """These requests have other keys now, or none: nobody wants what is loaded or audited for
        them."""
        for state in states:
            if state.load.job is not None:
                self._jobs.cancel_load(state.load.job)
            self.stop_prefetch(state)
            self._auditor.drop(state)

    def drop_unsent_stores(self) -> None:
        """What they would read may have been computed with other weights than their keys name: vLLM
        tells of the end of a request before it hands over what ranks report of the same step."""
        for planned in self._jobs.drop_unsent_stores():
            self._index.settle(planned.job.keys, planned.job.job_id)
            self._end(planned)

    # -- blocks that stores read -----------------------------------------------------------------

    def cancel_overwritten(self) -> None:
        """Stores that read blocks vLLM has handed out: the step being planned overwrites them."""
        if reused := self._witness.take_reused():
            for planned in self._jobs.vacate(reused):
                self._index.settle(planned.job.keys, planned.job.job_id)  # no hits any more
                if not self._jobs.is_open(planned.job.job_id):
                    self._end(planned)

    # -- reports ---------------------------------------------------------------------------------

    def report(self, rank: int, result: JobResult) -> None:
        """What one rank says of one job."""
        if result.job_id < self._jobs.first_id:
            return
        planned, has_ended = self._jobs.report(result)
        if isinstance(planned.job, LoadJob) and result.outcome is Outcome.MISSING:
            key = planned.job.keys[result.num_chunks]
            planned.state.lookup.lose(key)
            self._kv_events.gone(Tier.REDIS, rank, key)
        if has_ended:
            self._end(planned)

    def take_short_loads(self) -> list[ShortLoad]:
        """Loads that have ended since the last call and did not bring everything."""
        short_loads, self._short_loads = self._short_loads, []
        return short_loads

    # -- details ---------------------------------------------------------------------------------

    def _plan_request(
        self, state: RequestState, scheduler_output: SchedulerOutput, *, is_drafted: bool
    ) -> None:
        request_id = state.request.request_id
        block_state = scheduler_output.kv_connector_block_state
        num_tokens = scheduler_output.num_scheduled_tokens[request_id]
        is_own, is_sure = self._book.computes_its_own(state, num_tokens)
        num_own = num_tokens if is_own and is_drafted else 0
        is_sure &= self._settings.drafted_len is None  # else every step decides
        may_be_more = self._witness.scheduled(state, num_own, is_sure=is_sure)
        offers = block_state.boundary_state_offloads.get(request_id, ())
        if not (may_be_more or offers):
            return
        num_tokens = state.witness.num_tokens or 0
        block_ids = partial(block_state.get_block_ids, request_id)
        snapshots = self._snapshots(state, offers)
        if self._settings.stores and (snapshots or self._stores.is_due(state, num_tokens)):
            self._plan_store(state, num_tokens, block_ids, snapshots)
            if state.transfer.stores:
                self._transfers.planned(state)
        if self._auditor.is_due(state, num_tokens):
            audit = self._auditor.plan(state, self._jobs.new_id(), block_ids)
            if audit is not None:
                self._start(state, audit)

    def _is_drafted(self, scheduler_output: SchedulerOutput, max_len: int) -> bool:
        """Whether the model's drafter computes the step's tokens too: for all requests together, or
        for none."""
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {request.req_id: request.num_computed_tokens for request in new}
        scheduled = scheduler_output.num_scheduled_tokens
        return all(starts[name] + count <= max_len for name, count in scheduled.items())

    def _plan_store(
        self,
        state: RequestState,
        num_witnessed_tokens: int,
        resolve_block_ids: Callable[[], Sequence[Sequence[int]]],
        snapshots: Sequence[Snapshot] = (),
    ) -> None:
        job = self._stores.plan(state, num_witnessed_tokens, resolve_block_ids, snapshots)
        if job is not None:
            self._start(state, job)

    def _snapshots(
        self, state: RequestState, offers: Sequence[tuple[int, int, int]]
    ) -> list[Snapshot]:
        """The states that the step being planned computes: group, block, and after how many tokens.
        Each where a chunk ends, and whole: vLLM offers those of all groups of a part."""
        blocks = {
            (group, num_tokens): block
            for group, block, num_tokens in offers
            if self._witness.computes_state(state, group, block, num_tokens)
        }
        ends = sorted({num_tokens for _, num_tokens in blocks})
        size = self._settings.chunk_size
        return [
            Snapshot(number, end // size, tuple((blocks[group, end],) for group in part.groups))
            for end in ends
            for number, part in enumerate(self._settings.parts)
            if part.rule is Rule.STATE
            and end % size == 0
            and all((group, end) in blocks for group in part.groups)
        ]

    def _cancel(self, jobs: Iterable[PrefetchJob]) -> None:
        for job in jobs:
            self._jobs.cancel_load(job)

    def _start(self, state: RequestState, job: LoadJob | StoreJob | PrefetchJob) -> None:
        for run in job.runs if self._book.has_current_keys(state) else ():
            if run.part == 0:  # the others have no events: a chunk is told of once
                describe = partial(self._describe, state, run)
                keys = run.keys[:-1] if run.tail_tokens else run.keys  # no router asks for a tail
                self._kv_events.describe(keys, job.job_id, describe)
        self._auditor.learn(job)
        if self._spans.is_on:
            self._spans.begin(state.request, _span_name(job))
        self._jobs.add(state, job)
        if isinstance(job, StoreJob):
            self.held.pin(job)
            self._loads.store_planned(job)

    def _describe(self, state: RequestState, run: PartRun, index: int) -> BlockRun:
        sizes = self._settings.chunk_size, self._witness.hash_block_size
        shared = self._book.is_shared(state)
        return describe_chunk(
            state.request, run.chunks[index], state.keys.keys, *sizes, shared=shared
        )

    def _end(self, planned: PlannedJob) -> None:
        state, job = planned.state, planned.job
        self.held.forget(job.job_id)
        if self._spans.is_on:
            self._spans.end(state.request, _span_name(job), _span_attributes(planned))
        if isinstance(job, LoadJob):
            self._transfers.let_go(job.request_id)
            if job.source is None or job.source.is_trusted:
                self._witness.loaded(state, job, planned.num_chunks)
            short = self._loads.ended(state, job, planned.num_chunks, planned.results)
            self._short_loads += [short] if short is not None else []
        elif isinstance(job, PrefetchJob):
            self._cancel(self._prefetcher.ended(state, job, planned.results))
            if state.load.job is None:
                self._loads.reconsider(state)
        elif isinstance(job, AuditJob):
            finding = self._auditor.ended(state, job, planned.results)
            epoch = self._book.epochs.epoch(finding.root)
            rekeyed = self._book.follow(finding)
            if self._book.epochs.epoch(finding.root) != epoch:
                self._kv_events.clear()  # those of other roots too: it is rare
            if rekeyed is not None:
                self._witness.disown()
                self.abandon(rekeyed)
        else:
            self._loads.store_ended(job, planned.results)
            self._stores.ended(state, job, planned.results)
        self._kv_events.settle(job.keys, job.job_id)
        self._book.forget_if_done(state)


def _span_name(job: LoadJob | StoreJob | PrefetchJob) -> str:
    kind = type(job).__name__.removesuffix("Job").lower()
    return f"{kind} {job.job_id}"


def _span_attributes(planned: PlannedJob) -> dict[str, str | int | float]:
    results = planned.results
    return {
        "chunks": len(planned.job.keys),
        "chunks_done": planned.num_chunks,
        "bytes": sum(result.num_bytes for result in results),
        "fetched_bytes": sum(result.fetched_bytes for result in results),
        "waited_seconds": max((result.waited_seconds for result in results), default=0.0),
        "outcome": next(
            (r.outcome.value for r in results if r.outcome is not Outcome.DONE), "done"
        ),
    }
