"""Which chunks of a request a store job shall take, and from which blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache_connector.plans import BlockIds, StoreJob
from lmcache_connector.scheduler.chunk_index import ChunkIndex
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings

GENERATED_RUN_CHUNKS = 4
"""Chunks with generated tokens are stored so many at a time: what a job costs beside its bytes is
the same for one chunk as for four, and nobody can want them before the answer is there."""


class StorePlanner:
    """Each full chunk is planned once, unless some tier has it: one of the prompt as soon as it is
    computed, the others in runs, and when the request ends.

    With ``redis_only_reused`` a chunk goes to the CPU tier alone at first, and on to Redis with the
    next request that has it in its prompt.
    """

    def __init__(
        self, settings: SchedulerSettings, index: ChunkIndex, new_job_id: Callable[[], int]
    ) -> None:
        self._settings = settings
        self._index = index
        self._new_job_id = new_job_id
        self._sightings = ReuseTracker()

    def is_due(self, state: RequestState, num_computed_tokens: int) -> bool:
        """Cheap: asked for every request in every step."""
        first, size = state.next_store_chunk, self._settings.chunk_size
        due_at = (first + 1) * size
        if due_at > state.request.num_prompt_tokens:
            due_at = (first + GENERATED_RUN_CHUNKS) * size
        return num_computed_tokens >= due_at and state.request.num_tokens >= due_at

    def plan(
        self,
        state: RequestState,
        num_computed_tokens: int,
        resolve_block_ids: Callable[[], Sequence[Sequence[int]]],
    ) -> StoreJob | None:
        """Store the full chunks among the first ``num_computed_tokens`` that no tier has.

        Only known token ids count: with asynchronous scheduling or speculation the number of
        computed tokens runs ahead of them.
        """
        if not state.may_store:
            return None
        request = state.request
        known = request.num_tokens
        if not self._settings.store_generated:
            known = min(known, request.num_prompt_tokens)
        end = min(num_computed_tokens, known) // self._settings.chunk_size
        if end <= state.next_store_chunk:
            return None
        state.keys.extend(request.all_token_ids)
        keys = state.keys.keys
        reused = self._reused(state, end)
        chunks = tuple(
            i
            for i in range(state.next_store_chunk, end)
            if keys[i] not in self._index or (reused is not None and keys[i] in reused)
        )
        state.next_store_chunk = end
        if not chunks:
            return None
        job = StoreJob(
            job_id=self._new_job_id(),
            request_id=request.request_id,
            keys=tuple(keys[i] for i in chunks),
            chunk_indices=chunks,
            block_ids=self._blocks_of(resolve_block_ids(), chunks),
            redis_keys=reused,
        )
        state.store_jobs.add(job.job_id)
        self._index.plan(job.keys, job.job_id)
        return job

    def _reused(self, state: RequestState, end: int) -> frozenset[bytes] | None:
        """Chunks that this request is the second to want; ``None`` where all go to Redis."""
        if not self._settings.redis_only_reused:
            return None
        new = state.keys.keys[state.sighted_chunks : end]
        state.sighted_chunks = max(state.sighted_chunks, end)
        return frozenset(key for key in new if self._sightings.is_second(key))

    def _blocks_of(self, block_ids: Sequence[Sequence[int]], chunks: tuple[int, ...]) -> BlockIds:
        groups = []
        for ids, size in zip(block_ids, self._settings.block_sizes, strict=True):
            per_chunk = self._settings.chunk_size // size
            groups.append(
                tuple(b for i in chunks for b in ids[i * per_chunk : (i + 1) * per_chunk])
            )
        return tuple(groups)


_MAX_CHUNKS = 1 << 18  # about 40 MB; with 256 tokens each, 67 million tokens


class ReuseTracker:
    """Counts to two, for the ``capacity`` chunks seen last. O(1) per chunk. Not thread-safe."""

    def __init__(self, capacity: int = _MAX_CHUNKS) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[bytes, bool] = OrderedDict()  # key -> seen twice

    def is_second(self, key: bytes) -> bool:
        """True the second time a chunk is seen, and only then."""
        twice = self._seen.get(key)
        self._seen[key] = twice is not None
        self._seen.move_to_end(key)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return twice is False
