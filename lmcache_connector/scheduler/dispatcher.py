"""The life of a job: its start, the ranks' results, and the update of the request's state.

The load planner, the store planner, the prefetcher and the auditor plan jobs. The dispatcher hands
these to the workers, ends them, and notifies every component concerned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial

from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.kv_events.log import BlockRun, KvEventLog
from lmcache_connector.kv_events.vllm_events import describe_chunk
from lmcache_connector.lookup.chunk_index import ChunkIndex
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
from lmcache_connector.scheduler.store_planner import StorePlanner
from lmcache_connector.scheduler.transfers import RequestTransfers
from lmcache_connector.tracing.spans import Spans
from lmcache_connector.vllm_compat.short_loads import ShortLoad


@dataclass(eq=False)
class JobDispatcher:
    """Starts and ends all jobs. ``kv_events`` gets the chunks that jobs may bring to the tiers,
    ``spans`` the start and end of each job."""

    settings: SchedulerSettings
    book: RequestBook
    index: ChunkIndex
    policy: LoadPolicy
    jobs: PlannedJobs
    loads: LoadPlanner
    stores: StorePlanner
    prefetcher: Prefetcher
    auditor: Auditor
    witness: BlockWitness
    held: HeldBlocks
    kv_events: KvEventLog
    spans: Spans
    transfers: RequestTransfers

    def start(self, state: RequestState, job: LoadJob | StoreJob | PrefetchJob) -> None:
        """Hand the job to the workers with the next plan."""
        for run in job.runs if self.book.has_current_keys(state) else ():
            if run.part == 0:  # one event per chunk, not per part
                describe = partial(self._describe, state, run)
                keys = run.keys[:-1] if run.tail_tokens else run.keys  # routers look for no tails
                self.kv_events.describe(keys, job.job_id, describe)
        self.auditor.learn(job)
        if self.spans.is_on:
            self.spans.begin(state.request, _span_name(job))
        self.jobs.add(state, job)
        if isinstance(job, StoreJob):
            self.held.pin(job)
            self.policy.store_planned(job)

    def stop_prefetch(self, state: RequestState, loaded: Collection[bytes] = ()) -> None:
        """The request no longer waits; it loads ``loaded`` now."""
        for job in self.prefetcher.release(state, loaded):
            self.jobs.cancel_load(job)

    def abandon(self, states: Iterable[RequestState]) -> None:
        """Cancel loads, prefetches and audits of requests whose keys have changed or are void."""
        for state in states:
            if state.load.job is not None:
                self.jobs.cancel_load(state.load.job)
            self.stop_prefetch(state)
            self.auditor.drop(state)

    def drop_unsent_stores(self) -> None:
        """Drop stores that might read KV of other weights than their keys name: vLLM announces the
        end of a request before it passes on the ranks' reports of the same step."""
        for planned in self.jobs.drop_unsent_stores():
            self.index.settle(planned.job.keys, planned.job.job_id)
            self._end(planned)

    def cancel_overwritten(self) -> None:
        """Cancel stores of reused blocks: the step being planned overwrites these."""
        if reused := self.witness.take_reused():
            for planned in self.jobs.vacate(reused):
                self.index.settle(planned.job.keys, planned.job.job_id)  # no hits from now on
                if not self.jobs.is_open(planned.job.job_id):
                    self._end(planned)

    def report(self, rank: int, result: JobResult) -> list[ShortLoad]:
        """Apply one rank's result of one job. Returns the job's load if it has ended incomplete."""
        if result.job_id < self.jobs.first_id:
            return []
        planned, has_ended = self.jobs.report(result)
        if isinstance(planned.job, LoadJob) and result.outcome is Outcome.MISSING:
            key = planned.job.keys[result.num_chunks]
            planned.state.lookup.lose(key)
            self.kv_events.gone(Tier.REDIS, rank, key)
        return self._end(planned) if has_ended else []

    def _end(self, planned: PlannedJob) -> list[ShortLoad]:
        state, job, short = planned.state, planned.job, None
        self.held.forget(job.job_id)
        if self.spans.is_on:
            self.spans.end(state.request, _span_name(job), _span_attributes(planned))
        if isinstance(job, LoadJob) and job.in_step:
            self.policy.load_ended_in_step(planned.results)
        elif isinstance(job, LoadJob):
            self.transfers.drop_source(job.request_id)
            if job.source is None or job.source.is_trusted:
                self.witness.loaded(state, job, planned.num_chunks)
            short = self.loads.ended(state, job, planned.num_chunks, planned.results)
        elif isinstance(job, PrefetchJob):
            for other in self.prefetcher.ended(state, job, planned.results):
                self.jobs.cancel_load(other)
            if state.load.job is None:
                state.load.restart()  # decide again: more of the hit is in memory now
        elif isinstance(job, AuditJob):
            if (root := self.auditor.ended(state, job, planned.results)) is not None:
                self.kv_events.clear()  # of all roots: mismatches are rare
                self.witness.invalidate_all()
                self.abandon(self.book.separate(root))
        else:
            self.policy.store_ended(job.job_id, planned.results)
            self.stores.ended(state, job, planned.results)
        self.kv_events.settle(job.keys, job.job_id)
        self.book.forget_if_done(state)
        return [short] if short is not None else []

    def _describe(self, state: RequestState, run: PartRun, index: int) -> BlockRun:
        sizes = self.settings.chunk_size, self.witness.hash_block_size
        shared = self.book.is_shared(state)
        return describe_chunk(
            state.request, run.chunks[index], state.keys.keys, *sizes, shared=shared
        )


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
