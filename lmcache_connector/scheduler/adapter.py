"""The scheduler side: finds hits, plans load and store jobs, learns how they ended.

Token ranges of one request, chunks of ``chunk_size`` tokens::

    |-- vLLM has these --|------ hit, loaded ------|-- computed --|
    0            num_computed                  hit end        num_tokens
              first chunk ^ may begin inside a chunk

One :class:`RequestState` per request owns everything known about it. It outlives the request while
store jobs still read its blocks; :class:`LoadPlanner` says what of it can and shall be loaded. Runs
on the engine's scheduler thread only.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmcache_connector.cost_model.load_policy import LoadPolicy
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.plans import (
    Calibration,
    Hold,
    JobResult,
    LoadJob,
    Outcome,
    RankReport,
    StepPlan,
    StoreJob,
    Tier,
)
from lmcache_connector.scheduler.background_lookup import BackgroundLookup
from lmcache_connector.scheduler.chunk_index import ChunkIndex
from lmcache_connector.scheduler.counters import SchedulerCounters
from lmcache_connector.scheduler.jobs import PlanDraft, PlannedJob, PlannedJobs
from lmcache_connector.scheduler.kv_events import KvEvent, KvEventLog
from lmcache_connector.scheduler.load_planner import LoadPlanner
from lmcache_connector.scheduler.prefill_work import prefill_work
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings
from lmcache_connector.scheduler.store_planner import StorePlanner
from lmcache_connector.scheduler.vllm_kv_events import describe_chunk

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from lmcache_connector.storage.redis.circuit_breaker import CircuitState


class SchedulerAdapter:
    """Maps vLLM's scheduler-side connector calls onto plans.

    ``identify(request, epoch)`` returns what makes the request's KV unique, or ``None`` for one
    that must bypass the cache. Without ``choice`` every hit is loaded. With ``kv_events`` it is
    told what the tiers take in and let go.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        hasher: PrefixHasher,
        identify: Callable[[Request, str], RequestIdentity | None],
        lookup: BackgroundLookup | None,
        choice: LoadPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        kv_events: KvEventLog | None = None,
        new_epoch: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._settings = settings
        self._hasher = hasher
        self._identify = identify
        self._choice = choice
        self._kv_events = kv_events
        self._index = ChunkIndex(settings.world_size)
        self._states: dict[str, RequestState] = {}
        self._jobs = PlannedJobs(settings.world_size)
        self._store_planner = StorePlanner(settings, self._index, self._jobs.new_id)
        self._new_epoch = new_epoch
        self._epoch = ""  # as loaded: everyone with these weights shares
        # Requests in the last plan that have not finished since.
        self._scheduled: set[str] = set()
        self._draft = PlanDraft()
        self.counters = SchedulerCounters()
        self._hits = LoadPlanner(
            settings, self._index, lookup, choice, kv_events, self.counters, clock
        )

    # -- hits ----------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Hash the prompt and ask Redis at once: the answer is there when it is scheduled."""
        state = self._state(request)
        if state is not None and self._settings.loads and not _skips_reading(request):
            self._hits.ask_redis(state, first=0)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond ``num_computed_tokens``; ``None``: ask again."""
        if not self._settings.loads or _skips_reading(request):
            return 0, False
        state = self._state(request)
        if state is None or not state.may_load:
            return 0, False
        first = num_computed_tokens // self._settings.chunk_size
        self._hits.ask_redis(state, first)
        if not self._hits.redis_answered(state, num_computed_tokens, is_idle=self.is_idle):
            return None, False
        if not state.counted:
            self._hits.count_lookup(state, num_computed_tokens)
        end = self._hits.load_end(state, num_computed_tokens)
        num_tokens = end * self._settings.chunk_size - num_computed_tokens
        if num_tokens <= 0:
            return 0, False
        state.offered_from = num_computed_tokens
        return num_tokens, True

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Plan the load of ``num_external_tokens`` into the request's blocks."""
        state = self._states.get(request.request_id)
        if num_external_tokens <= 0 or state is None or state.load_job is not None:
            return
        start, chunk_size = state.offered_from, self._settings.chunk_size
        end = start + num_external_tokens
        chunks = range(start // chunk_size, -(-end // chunk_size))
        keys = tuple(state.keys.keys[i] for i in chunks)
        are_in_cpu = self._index.has_each(keys)
        redis_keys = tuple(key for key, local in zip(keys, are_in_cpu, strict=True) if not local)
        job = LoadJob(
            job_id=self._jobs.new_id(),
            request_id=request.request_id,
            keys=keys,
            block_ids=tuple(
                tuple(ids[start // size : -(-end // size)])
                for ids, size in zip(block_ids, self._settings.block_sizes, strict=True)
            ),
            skip_blocks=(start % chunk_size) // self._settings.block_sizes[0],
            deadline_seconds=state.deadline_seconds,
            needs_redis=bool(redis_keys),
            after_job=max(map(self._index.planned_job, keys)),
        )
        state.load_job = job
        self._describe(state, chunks)
        self._start(state, job)
        self._draft.loads.append(job)
        if self._choice is not None:
            self._choice.load_planned(job, redis_keys)
        self._count_hits(state, len(redis_keys), num_external_tokens)

    def redis_hit_tokens(self, request: Request) -> int:
        """Of the load planned last for this request: tokens that come from Redis."""
        state = self._states.get(request.request_id)
        return state.redis_hit_tokens if state is not None else 0

    @property
    def is_idle(self) -> bool:
        """No request is in the last plan, but those that have finished since."""
        return not self._scheduled

    def lookup_servers(self) -> tuple[tuple[str, CircuitState], ...]:
        """``(node, circuit state)`` of the servers that are asked."""
        return self._hits.lookup.servers() if self._hits.lookup is not None else ()

    def take_lookup_seconds(self) -> list[float]:
        """How long each question to Redis was on its way, of those answered since the last call."""
        return self._hits.lookup.take_seconds() if self._hits.lookup is not None else []

    # -- plans ---------------------------------------------------------------------------------

    def build_plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Everything planned since the last step, and the stores this step makes possible."""
        vacated = self._vacate(scheduler_output.preempted_req_ids or ())
        if self._settings.stores:
            self._plan_stores(scheduler_output)
        self._scheduled = set(scheduler_output.num_scheduled_tokens)
        self._hits.next_step()
        prefill = prefill_work(scheduler_output, self._states)
        probe = self._wants_probe(len(self._scheduled))
        return self._draft.take(
            vacated_stores=vacated, idle=not self._scheduled, prefill=prefill, probe=probe
        )

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> bool:
        """True: store jobs still read the blocks, and the worker side will say when they end."""
        self._scheduled.discard(request.request_id)
        state = self._states.get(request.request_id)
        if state is None or state.finished:
            return False
        state.finished = True
        if state.lookup is not None:
            state.lookup.cancel()
        if state.load_job is not None:
            # vLLM itself keeps the blocks of an aborted load until it is reported.
            self._draft.cancelled_loads.append(state.load_job.job_id)
            return False
        if self._settings.stores:
            settled = request.num_computed_tokens - request.num_in_flight_tokens
            self._plan_store(state, settled, lambda: block_ids)
        if not state.store_jobs:
            self._forget(state)
            return False
        self._draft.holds.append(Hold(request.request_id, tuple(sorted(state.store_jobs))))
        return True

    # -- reports -------------------------------------------------------------------------------

    def calibrate(self, calibrations: Iterable[Calibration]) -> None:
        """What the ranks measured at start, before the first request."""
        if self._choice is not None:
            self._choice.calibrate(calibrations)

    def update_from_reports(self, reports: Sequence[RankReport]) -> None:
        """``reports``: of all ranks that had something to report in one step."""
        if self._choice is not None:
            self._choice.observe_reports(reports)
        for report in reports:
            self._index.apply(report.rank, report.events)
            if self._kv_events is not None:
                self._kv_events.apply(report)
            for result in report.results:
                self._finish_rank(report.rank, result)

    def reset_cache(self) -> None:
        """From now on this instance hits nothing it stored before: all its keys change.

        vLLM tells a connector nothing of weight updates, neither when nor to what: a reset is all
        it sees. So the weights may now be anybody's guess, and this instance shares with nobody
        until it starts again: its keys hold an epoch that no other will ever have. Other instances
        keep theirs. O(requests in flight).
        """
        epoch = self._epoch = self._new_epoch()
        if self._kv_events is not None:
            self._kv_events.clear()
        for state in self._states.values():
            state.may_load = False
            if state.load_job is not None:
                self._draft.cancelled_loads.append(state.load_job.job_id)
            # What its blocks hold now was computed before the reset.
            state.may_store = state.request.num_computed_tokens == 0
            identity = self._identify(state.request, epoch)
            if identity is None:  # by now it would bypass us: its keys shall be nobody else's
                identity = RequestIdentity(cache_salt=f"{epoch}/{state.request.request_id}")
            state.keys = RequestKeys(self._hasher, identity)
            state.next_store_chunk = 0
            state.load_end = None
            state.redis_chunks, state.lookup_chunks = frozenset(), ()

    def take_kv_events(self) -> list[KvEvent]:
        """What the tiers took in and let go since the last call, for routers."""
        return self._kv_events.take() if self._kv_events is not None else []

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless nothing is left over once all requests are gone."""
        assert not self._states, f"requests left: {list(self._states)}"
        assert len(self._jobs) == 0, f"{len(self._jobs)} jobs left"
        assert self._index.num_planned == 0, "planned chunks left"

    @property
    def index(self) -> ChunkIndex:
        return self._index

    def shutdown(self) -> None:
        if self._hits.lookup is not None:
            self._hits.lookup.close()

    # -- hits, in detail -----------------------------------------------------------------------

    def _state(self, request: Request) -> RequestState | None:
        """The state of a request with all its full chunks hashed; ``None``: it bypasses us."""
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            identity = self._identify(request, self._epoch)
            if identity is None:
                return None
            state = RequestState(request, RequestKeys(self._hasher, identity))
            self._states[request.request_id] = state
        state.keys.extend(request.all_token_ids)
        return state

    def _count_hits(self, state: RequestState, num_redis_chunks: int, num_tokens: int) -> None:
        redis_tokens = min(num_tokens, num_redis_chunks * self._settings.chunk_size)
        state.redis_hit_tokens = redis_tokens
        self.counters.count_hit(num_tokens, redis_tokens)

    def _count_saved(self, state: RequestState, job: LoadJob, num_chunks: int) -> None:
        skipped = job.skip_blocks * self._settings.block_sizes[0]
        num_tokens = num_chunks * self._settings.chunk_size - skipped
        if num_tokens <= 0:
            return
        self.counters.saved_tokens += num_tokens
        if self._choice is not None:
            start = state.offered_from
            seconds = self._choice.model.compute_seconds(start, start + num_tokens)
            self.counters.saved_seconds += seconds or 0.0

    # -- stores, in detail ---------------------------------------------------------------------

    def _plan_stores(self, scheduler_output: SchedulerOutput) -> None:
        block_state = scheduler_output.kv_connector_block_state
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is None:
                continue
            computed = state.request.num_computed_tokens + num_scheduled
            if self._store_planner.is_due(state, computed):
                self._plan_store(state, computed, partial(block_state.get_block_ids, request_id))

    def _plan_store(
        self,
        state: RequestState,
        num_computed_tokens: int,
        resolve_block_ids: Callable[[], Sequence[Sequence[int]]],
    ) -> None:
        job = self._store_planner.plan(state, num_computed_tokens, resolve_block_ids)
        if job is not None:
            self._describe(state, job.chunk_indices)
            self._start(state, job)
            self._draft.stores.append(job)

    def _describe(self, state: RequestState, chunks: Iterable[int]) -> None:
        """Before a job for these chunks: what routers will want to know of them."""
        if self._kv_events is None:
            return
        keys, sizes = state.keys.keys, (self._settings.chunk_size, self._settings.block_sizes[0])
        for i in chunks:
            self._kv_events.describe(
                keys[i], partial(describe_chunk, state.request, i, keys, *sizes)
            )

    def _vacate(self, preempted: Iterable[str]) -> tuple[int, ...]:
        """Store jobs that read blocks vLLM has taken back."""
        vacated: list[int] = []
        for request_id in preempted:
            state = self._states.get(request_id)
            if state is not None:
                vacated += sorted(state.store_jobs)
                state.next_store_chunk = 0
                state.load_end = None
                state.may_store = True
        return tuple(vacated)

    # -- figures -------------------------------------------------------------------------------

    def _wants_probe(self, num_requests: int) -> bool:
        if self._choice is None:
            return False
        self._choice.step_planned(num_requests)
        probe = self._choice.take_probe()
        self.counters.probes += probe
        return probe

    # -- jobs, in detail -----------------------------------------------------------------------

    def _start(self, state: RequestState, job: LoadJob | StoreJob) -> None:
        self._jobs.start(state, job)
        self.counters.count_job(job)

    def _finish_rank(self, rank: int, result: JobResult) -> None:
        running, ended = self._jobs.report(result)
        if isinstance(running.job, LoadJob):
            self.counters.count_load(running.job, result)
            if result.outcome is Outcome.MISSING:
                self._learn_missing(rank, running.job.keys[result.num_chunks])
        if ended:
            self._finish(running)

    def _learn_missing(self, rank: int, key: bytes) -> None:
        """Whatever the events said, or no request would ever store this chunk again."""
        self._index.drop(rank, key)
        if self._kv_events is not None:
            self._kv_events.gone(Tier.CPU, rank, key)
            self._kv_events.gone(Tier.REDIS, rank, key)

    def _finish(self, running: PlannedJob) -> None:
        state, job = running.state, running.job
        if isinstance(job, LoadJob):
            if self._choice is not None:
                self._choice.load_ended(job.job_id, running.results)
            state.load_job = None
            self._count_saved(state, job, running.num_chunks)
            if running.num_chunks < len(job.keys):
                # The tier that failed is not asked again for this request: it is recomputed.
                state.may_load = False
                self.counters.recomputed_tokens += (
                    len(job.keys) - running.num_chunks
                ) * self._settings.chunk_size
        else:
            state.store_jobs.discard(job.job_id)
            self._index.settle(job.keys, job.job_id)
        if self._kv_events is not None:
            self._kv_events.settle(job.keys)
        if state.finished and not state.store_jobs and state.load_job is None:
            self._forget(state)

    def _forget(self, state: RequestState) -> None:
        if self._states.get(state.request.request_id) is state:
            del self._states[state.request.request_id]


def _skips_reading(request: Request) -> bool:
    return bool(request.skip_reading_prefix_cache)
