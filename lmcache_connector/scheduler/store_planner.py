"""Which chunks of a request a store job shall take, and from which blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.metrics.tally import Tally
from lmcache_connector.plans import AdapterRef, BlockIds, JobResult, Outcome, PartRun, StoreJob
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings

GENERATED_RUN_CHUNKS = 4
"""Chunks with generated tokens are stored so many at a time: what a job costs beside its bytes is
the same for one chunk as for four, and nobody can want them before the answer is there."""
_MAX_TRACKED_CHUNKS = 1 << 18
"""About 40 MB; with 256 tokens each, 67 million tokens."""


class ReuseTracker:
    """Counts how often each chunk is wanted.

    Remembers the ``capacity`` chunks seen last. O(1) per chunk. Not thread-safe.
    """

    def __init__(self, capacity: int = _MAX_TRACKED_CHUNKS) -> None:
        self._capacity = capacity
        self._times: OrderedDict[bytes, int] = OrderedDict()

    def sight(self, key: bytes) -> int:
        """The chunk is wanted: for how many times now."""
        times = self._times[key] = self._times.get(key, 0) + 1
        self._times.move_to_end(key)
        if len(self._times) > self._capacity:
            self._times.popitem(last=False)
        return times


class StorePlanner:
    """Plans each full chunk once, unless some tier has it: one of the prompt as soon as it is
    computed, the others in runs, and what is left when the request ends.

    With ``redis_only_reused`` a chunk goes to the CPU tier alone at first, and on to Redis with the
    next request that has it in its prompt. Owns the store part of every request's state.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        index: ChunkIndex,
        tally: Tally,
        new_job_id: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._index = index
        self._tally = tally
        self._new_job_id = new_job_id
        self._reuse_tracker = ReuseTracker()

    def is_due(self, state: RequestState, num_witnessed_tokens: int) -> bool:
        """Whether there may be something to store. Cheap: asked for every block that is full."""
        first, size = state.store.next_chunk, self._settings.chunk_size
        due_at = (first + 1) * size
        if due_at > state.request.num_prompt_tokens:
            due_at = (first + GENERATED_RUN_CHUNKS) * size
        return num_witnessed_tokens >= due_at and state.request.num_tokens >= due_at

    def plan(
        self,
        state: RequestState,
        num_witnessed_tokens: int,
        resolve_block_ids: Callable[[], Sequence[Sequence[int]]],
    ) -> StoreJob | None:
        """A store of the full chunks among the first ``num_witnessed_tokens`` that no tier has.

        ``resolve_block_ids`` lists the request's blocks per KV cache group; it is called if there
        is something to store.
        """
        store, keys = state.store, state.keys.keys
        end = self._storable_chunks(state, num_witnessed_tokens)
        if end <= store.next_chunk:
            return None
        state.keys.extend(state.request.all_token_ids)
        redis_keys = self._reused_keys(state, end)
        chunks = tuple(
            i
            for i in range(store.next_chunk, end)
            if keys[i] != state.audit.key  # what an audit compares with must not be this
            and (keys[i] not in self._index or (redis_keys is not None and keys[i] in redis_keys))
        )
        store.next_chunk = end
        if not chunks:
            return None
        run = PartRun(
            part=0,
            keys=tuple(keys[i] for i in chunks),
            chunks=chunks,
            block_ids=self._blocks_of(resolve_block_ids(), chunks),
        )
        job = StoreJob(
            job_id=self._new_job_id(),
            request_id=state.request.request_id,
            runs=(run,),
            redis_keys=redis_keys,
            adapter=adapter_of(state),
        )
        store.job_ids.add(job.job_id)
        self._index.plan(job.keys, job.job_id)
        self._tally.count("store_jobs")
        return job

    def ended(self, state: RequestState, job: StoreJob, results: Sequence[JobResult]) -> None:
        """All ranks have reported, or none was asked: the blocks were reused too soon."""
        state.store.job_ids.discard(job.job_id)
        if all(result.outcome is Outcome.CANCELLED for result in results):
            self._tally.count("dropped_stores", amount=len(job.keys))
        self._index.settle(job.keys, job.job_id)

    def _storable_chunks(self, state: RequestState, num_witnessed_tokens: int) -> int:
        """Full chunks whose token ids are known: with asynchronous scheduling or speculation the
        number of computed tokens runs ahead of them."""
        request = state.request
        known = request.num_tokens
        if not self._settings.store_generated:
            known = min(known, request.num_prompt_tokens)
        return int(min(num_witnessed_tokens, known) // self._settings.chunk_size)

    def _reused_keys(self, state: RequestState, end: int) -> frozenset[bytes] | None:
        """Chunks that this request is the second to want, and those wanted before that no memory
        holds: Redis may have lost them too. ``None`` where all go to Redis."""
        if not self._settings.redis_only_reused:
            return None
        new = state.keys.keys[state.store.num_sighted : end]
        state.store.num_sighted = max(state.store.num_sighted, end)
        times = {key: self._reuse_tracker.sight(key) for key in new}
        return frozenset(
            key for key, n in times.items() if n == 2 or (n > 2 and key not in self._index)
        )

    def _blocks_of(self, block_ids: Sequence[Sequence[int]], chunks: tuple[int, ...]) -> BlockIds:
        groups = []
        for ids, size in zip(block_ids, self._settings.block_sizes, strict=True):
            per_chunk = self._settings.chunk_size // size
            groups.append(
                tuple(b for i in chunks for b in ids[i * per_chunk : (i + 1) * per_chunk])
            )
        return tuple(groups)


def adapter_of(state: RequestState) -> AdapterRef | None:
    """The adapter that the request's KV must have been computed with."""
    identity = state.keys.identity
    return AdapterRef(identity.lora_number, identity.lora) if identity.lora is not None else None
