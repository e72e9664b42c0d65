"""Prefetching: fetches chunks into memory while their request waits in vLLM's queue.

Jobs are small: a load of the same chunks waits for one job at most, and all loads go first.

``prefetch_bytes`` bounds the prefetched bytes that are not yet used. A request takes its share of
this budget when its jobs are planned, first come, first served, and returns the share when vLLM
schedules or drops the request. Prefetched chunks that the request did not use are evicted next, so
requests that come and go evict no other chunks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from lmcache_connector.bounded import batches
from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.lookup.background_lookup import PENDING
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.lookup.hit_finder import FetchAhead, HitFinder
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import JobResult, PartRun, PrefetchJob, Tier
from lmcache_connector.scheduler.request_state import PrefetchState, RequestState, SchedulerSettings

_JOB_SECONDS = 0.05
"""Target duration of a job: a load of the same chunks may have to wait for the job."""
_MAX_JOB_BYTES = 16 << 20
_CHUNKS_PER_STEP = 256
"""Chunks examined per step, at least one prompt's: a long queue must not slow down the step."""
_CHUNKS_PER_REQUEST = 8
"""The cost of examining a request, beside its chunks'."""

_Chunk = tuple[int, int, bytes]
"""Part, index of the chunk, and key."""


@dataclass(eq=False)
class Prefetcher:
    """Plans prefetches, and owns the ahead part of every request's state.

    ``waiting``: requests by id without prefetches so far. ``unwanted``: prefetched chunks that
    their requests did not use, to report to the workers.
    """

    settings: SchedulerSettings
    policy: LoadPolicy
    tally: Tally
    new_job_id: Callable[[], int]
    index: ChunkIndex

    def __post_init__(self) -> None:
        self._room = self.settings.prefetch_bytes
        self._is_full = False  # too full for the request that is next
        self.waiting: OrderedDict[str, RequestState] = OrderedDict()
        self._next: set[str] = set()  # wait only for Redis' answer, in the step being planned
        # Number of waiting requests per chunk that is prefetched or being prefetched.
        self._wanted_by: Counter[bytes] = Counter()
        self.unwanted: list[bytes] = []

    def queued(self, state: RequestState) -> None:
        """vLLM has queued the request, and Redis was asked for its chunks."""
        if self.settings.prefetch_bytes and self.settings.loads:
            self.waiting[state.request.request_id] = state

    def is_next(self, request_id: str) -> None:
        """vLLM has asked for the request's hit in this step, and will in the next: a prefetch would
        only delay the load."""
        if request_id in self.waiting:
            self._next.add(request_id)

    def plan(self, hits: HitFinder) -> Iterator[tuple[RequestState, PrefetchJob]]:
        """Prefetches for requests that stay in vLLM's queue in this step, in order of arrival, as
        far as the budget allows."""
        num_looked_at = 0
        loads_next, self._next = self._next, set()
        while self.waiting and num_looked_at < _CHUNKS_PER_STEP:
            if self._is_full or self.policy.are_tiers_stalled:
                return
            request_id, state = next(iter(self.waiting.items()))
            if request_id in loads_next:  # vLLM takes those behind it later
                return
            num_looked_at += _CHUNKS_PER_REQUEST + len(state.keys.keys)
            ahead = hits.find_ahead(state.lookup, self._num_computed(state))
            if ahead is PENDING:  # those behind it were asked for later
                return
            chunks = self._take(state, ahead)
            if chunks is None:
                self._is_full = True
                return
            del self.waiting[request_id]
            for job, num_bytes in self._jobs(state, chunks):
                state.prefetch.jobs[job.job_id] = job, num_bytes
                self._room -= num_bytes
                self.tally.count("prefetch_jobs")
                yield state, job

    def release(self, state: RequestState, loaded: Collection[bytes] = ()) -> list[PrefetchJob]:
        """The request stops waiting: it computes, loads the chunks ``loaded``, or is gone.
        Returns the jobs to cancel."""
        self.waiting.pop(state.request.request_id, None)
        self._is_full = False
        prefetch = state.prefetch
        if not prefetch.keys:
            return []
        for key in prefetch.keys:
            self._wanted_by[key] -= 1
            if not self._wanted_by[key]:
                del self._wanted_by[key]
                if key not in loaded:
                    self.unwanted.append(key)
        jobs, self._room = prefetch.jobs, self._room + prefetch.held_bytes
        state.prefetch = PrefetchState(jobs=jobs)
        return [job for job, _ in jobs.values()]

    def ended(
        self, state: RequestState, job: PrefetchJob, results: Sequence[JobResult]
    ) -> list[PrefetchJob]:
        """All ranks have reported. Returns the jobs to cancel."""
        _, num_bytes = state.prefetch.jobs.pop(job.job_id)
        self._is_full = False
        if state.prefetch.keys:
            state.prefetch.held_bytes += num_bytes
        else:
            self._room += num_bytes
        self.policy.prefetch_ended(results)
        if any(result.has_fetch_failed for result in results):
            return [other for other, _ in state.prefetch.jobs.values()]
        return []

    def take_unwanted(self) -> tuple[bytes, ...]:
        unwanted, self.unwanted = tuple(self.unwanted), []
        return unwanted

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` if anything is left once all requests are gone."""
        assert not self.waiting, f"{len(self.waiting)} requests still wait for a prefetch"
        assert not self._wanted_by, f"{len(self._wanted_by)} prefetched chunks were not released"
        assert self._room == self.settings.prefetch_bytes, "some of the budget was not returned"

    # -- details -------------------------------------------------------------------------------

    def _num_computed(self, state: RequestState) -> int:
        """Tokens in vLLM's cache, known once vLLM has asked for the hit."""
        return state.load.decided_from if state.load.end is not None else 0

    def _take(self, state: RequestState, ahead: FetchAhead) -> list[_Chunk] | None:
        """Chunks to fetch: the leading ones that the budget allows, without those prefetched for
        other requests. ``None``: nothing fits before other requests return their share."""
        size = self.settings.chunk_size
        num_bytes = sum(map(self._bytes_of, ahead.missing))
        context = self._num_computed(state)
        end = min(ahead.stop * size, state.request.num_tokens - 1)
        if not ahead.missing or not self.policy.pays_from(Tier.CPU, context, end, num_bytes):
            return []
        chunks, room, keys = list[_Chunk](), self._room, list[bytes]()
        for chunk in ahead.missing:
            key = chunk[2]
            if key not in self._wanted_by:
                room -= self.policy.bytes_of(key)
                if room < 0:
                    break
                chunks.append(chunk)
            keys.append(key)
        if not keys and self._room < self.settings.prefetch_bytes:
            return None
        state.prefetch.keys = tuple(keys)
        self._wanted_by.update(keys)
        return chunks

    def _jobs(self, state: RequestState, chunks: list[_Chunk]) -> Iterator[tuple[PrefetchJob, int]]:
        """Jobs of consecutive chunks, each with the most bytes that it may bring."""
        most = min(_MAX_JOB_BYTES, self.policy.fetchable_bytes_in(_JOB_SECONDS))
        for batch in batches(chunks, self._bytes_of, most):
            yield self._job(state, batch), sum(map(self._bytes_of, batch))

    def _bytes_of(self, chunk: _Chunk) -> int:
        return self.policy.bytes_of(chunk[2])

    def _job(self, state: RequestState, chunks: list[_Chunk]) -> PrefetchJob:
        parts = dict.fromkeys(part for part, _, _ in chunks)
        runs = [[chunk for chunk in chunks if chunk[0] == part] for part in parts]
        return PrefetchJob(
            job_id=self.new_job_id(),
            request_id=state.request.request_id,
            runs=tuple(self._run(state, run) for run in runs),
            deadline_seconds=self.settings.load_deadline_seconds,
            tenant=state.claim.tenant,
        )

    def _run(self, state: RequestState, chunks: list[_Chunk]) -> PartRun:
        """``chunks`` must be of one part."""
        part, keys = chunks[0][0], [key for *_, key in chunks]
        numbers = [chunk for _, chunk, _ in chunks]
        num_owners = self.index.num_owners(part)
        return state.run(self.settings.parts, part, numbers, keys, (), num_owners)
