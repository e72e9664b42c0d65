"""How much of a request's hit shall be loaded, and the job that loads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lmcache_connector.cost_model.load_policy import LoadPolicy
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.metrics.tally import Tally
from lmcache_connector.plans import BlockIds, JobResult, LoadJob, PartRun, Tier
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings
from lmcache_connector.vllm_compat.short_loads import ShortLoad

logger = logging.getLogger(__name__)


class LoadPlanner:
    """Loads the part of a hit that ``policy`` finds quicker to load than to compute.

    Owns the load part of every request's state.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        index: ChunkIndex,
        policy: LoadPolicy,
        tally: Tally,
        new_job_id: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._index = index
        self._policy = policy
        self._tally = tally
        self._new_job_id = new_job_id

    def offer(self, state: RequestState, num_computed_tokens: int, hit: range) -> int:
        """How many tokens after the computed ones shall be loaded of the chunks that are hits.

        Decided once, until the request is preempted.
        """
        load = state.load
        if hit and load.end is None:
            self._decide(state, num_computed_tokens, hit)
        end = hit.stop if load.end is None else min(hit.stop, load.end)
        num_tokens = end * self._settings.chunk_size - num_computed_tokens
        if num_tokens <= 0:
            return 0
        load.offered_from = num_computed_tokens
        return num_tokens

    def plan(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> LoadJob:
        """The load of the ``num_tokens`` that vLLM has taken of the offer, into the request's
        blocks (per KV cache group)."""
        load, chunk_size = state.load, self._settings.chunk_size
        end = load.offered_from + num_tokens
        chunks = range(load.offered_from // chunk_size, -(-end // chunk_size))
        keys = tuple(state.keys.keys[chunks.start : chunks.stop])
        are_in_cpu = self._index.has_each(keys)
        redis_keys = tuple(key for key, in_cpu in zip(keys, are_in_cpu, strict=True) if not in_cpu)
        run = PartRun(
            part=0,
            keys=keys,
            chunks=tuple(chunks),
            block_ids=self._blocks_between(block_ids, load.offered_from, end),
            skip_blocks=load.offered_from % chunk_size // self._settings.block_sizes[0],
        )
        job = LoadJob(
            job_id=self._new_job_id(),
            request_id=state.request.request_id,
            runs=(run,),
            deadline_seconds=load.deadline_seconds,
            needs_redis=bool(redis_keys),
            after_job=max(map(self._index.planned_job, keys)),
        )
        load.job = job
        load.redis_tokens = min(num_tokens, len(redis_keys) * chunk_size)
        self._policy.load_planned(job, redis_keys)
        self._tally.count("load_jobs")
        self._tally.count("hit_tokens", Tier.CPU.value, amount=num_tokens - load.redis_tokens)
        self._tally.count("hit_tokens", Tier.REDIS.value, amount=load.redis_tokens)
        return job

    def ended(
        self, state: RequestState, job: LoadJob, num_chunks: int, results: Sequence[JobResult]
    ) -> ShortLoad | None:
        """All ranks have reported: the leading ``num_chunks`` of the job arrived on each."""
        load, chunk_size = state.load, self._settings.chunk_size
        load.job = None
        self._policy.load_ended(job.job_id, results)
        self._count_saved(load.offered_from, num_chunks * chunk_size - self._skipped_tokens(job))
        if num_chunks == len(job.keys):
            return None
        # The tier that failed is not asked again for this request: it is recomputed.
        load.is_allowed = False
        lost = (len(job.keys) - num_chunks) * chunk_size
        self._tally.count("recomputed_tokens", amount=lost)
        arrived = (load.offered_from // chunk_size + num_chunks) * chunk_size
        return ShortLoad(state.request, max(load.offered_from, arrived))

    def _decide(self, state: RequestState, num_computed_tokens: int, hit: range) -> None:
        load, request = state.load, state.request
        load.end, load.deadline_seconds = hit.stop, self._settings.load_deadline_seconds
        if num_computed_tokens >= request.num_tokens:
            return
        keys = state.keys.keys[hit.start : hit.stop]
        decision = self._policy.decide(
            num_computed_tokens, request.num_tokens, keys, self._index.has_each(keys)
        )
        load.end = hit.start + decision.num_chunks
        load.deadline_seconds = decision.deadline_seconds
        declined = (hit.stop - load.end) * self._settings.chunk_size
        self._tally.count("decisions", decision.reason.value)
        self._tally.count("declined_tokens", amount=declined)
        logger.debug("Request %s: %s", request.request_id, decision)

    def _blocks_between(self, block_ids: Sequence[Sequence[int]], start: int, end: int) -> BlockIds:
        return tuple(
            tuple(ids[start // size : -(-end // size)])
            for ids, size in zip(block_ids, self._settings.block_sizes, strict=True)
        )

    def _skipped_tokens(self, job: LoadJob) -> int:
        return job.runs[0].skip_blocks * self._settings.block_sizes[0]

    def _count_saved(self, start: int, num_tokens: int) -> None:
        """Tokens from ``start`` on were loaded instead of computed."""
        if num_tokens <= 0:
            return
        seconds = self._policy.model.compute_seconds(start, start + num_tokens)
        self._tally.count("prefill_saved_tokens", amount=num_tokens)
        self._tally.count("prefill_saved_seconds", amount=seconds or 0.0)
