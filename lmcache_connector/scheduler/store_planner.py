"""Decides which chunks of a request to store, and from which blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from typing import TYPE_CHECKING

from lmcache_connector.bounded import Latest
from lmcache_connector.keys.request_keys import Tail
from lmcache_connector.kv_parts.blocks import are_there, blocks_between
from lmcache_connector.kv_parts.hit import Hit, PlannedEnds, first_token_to_load
from lmcache_connector.kv_parts.part import BlockIds, BlockTables, Rule, keys_of_part, part_key
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import AdapterRef, JobResult, Outcome, PartRun, StoreJob
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request

GENERATED_CHUNKS_PER_JOB = 4
"""How many chunks of generated tokens one job stores of a model with full attention only: a job's
overhead is the same for four as for one, and no request can use them before the answer ends."""
_MAX_TRACKED_CHUNKS = 1 << 18
"""About 40 MB; with 128 tokens each, 33 million tokens."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The recurrent state of ``part`` after ``num_chunks`` chunks, one block per group."""

    part: int
    num_chunks: int
    block_ids: BlockIds


@dataclass(eq=False)
class StorePlanner:
    """Plans one store of each full chunk that the CPU tier lacks or that goes on to Redis: prompt
    chunks once computed, generated chunks several at a time, and the rest when the request ends.

    Windows are stored where a hit is likely to end: see :class:`PlannedEnds`. vLLM frees the blocks
    of a window soon, so a window is planned in the step that computes the chunk, with the chunk.

    With ``redis_admission`` "reused", a chunk first goes to the CPU tier only, and on to Redis with
    the next request whose prompt has the chunk. Owns the store part of every request's state.
    """

    settings: SchedulerSettings
    index: ChunkIndex
    tally: Tally
    new_job_id: Callable[[], int]

    def __post_init__(self) -> None:
        # How many requests have used each of the latest chunks.
        self._times_used: Latest[bytes, int] = Latest(_MAX_TRACKED_CHUNKS)
        self._ends = PlannedEnds(
            self.settings.parts, self.settings.chunk_size, self.settings.window_interval
        )
        self._has_states = any(part.rule is Rule.STATE for part in self.settings.parts)
        self._chunks_per_job = GENERATED_CHUNKS_PER_JOB if self.settings.is_prefix_only else 1

    def is_due(self, state: RequestState, num_witnessed_tokens: int) -> bool:
        """Whether there may be something to store. Cheap: called for every filled block."""
        first, size = state.store.next_chunk, self.settings.chunk_size
        due_at = (first + 1) * size
        if due_at > state.request.num_prompt_tokens:
            due_at = (first + self._chunks_per_job) * size
        known = state.request.num_tokens - self.settings.lookahead
        if num_witnessed_tokens >= due_at and known >= due_at:
            return True
        return state.transfer.stores and self._tail(state, num_witnessed_tokens) is not None

    def found(self, state: RequestState, hit: Hit) -> None:
        """If full attention's chunks reach further than the hit, plan windows and states for the
        place where they end, so that the next request with the same beginning has a hit there."""
        if hit.shared_end <= hit.stop:
            self.end_a_step_at_the_last_border(state.request)
            return
        state.store.junction = hit.shared_end
        if self._has_states:
            self._end_a_step_at(state.request, hit.shared_end)

    def end_a_step_at_the_last_border(self, request: Request) -> None:
        """Beside an EAGLE or MTP head, vLLM keeps no state after a prompt's last chunk, unless
        a step ends there."""
        if self._has_states and self.settings.lookahead and self.settings.stores:
            known = request.num_prompt_tokens - self.settings.lookahead
            self._end_a_step_at(request, known // self.settings.chunk_size)

    def _end_a_step_at(self, request: Request, num_chunks: int) -> None:
        """Let vLLM end a step after ``num_chunks`` chunks, and offer the recurrent states there.
        vLLM forgets the boundary whenever it asks for hits."""
        boundary = num_chunks * self.settings.chunk_size
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, boundary)

    def plan(
        self,
        state: RequestState,
        num_witnessed_tokens: int,
        resolve_block_ids: Callable[[], BlockTables],
        snapshots: Sequence[Snapshot] = (),
    ) -> StoreJob | None:
        """A store of ``snapshots`` and of the full chunks among the first ``num_witnessed_tokens``,
        as far as the CPU tier or, with admission of "reused", Redis may lack them.

        ``resolve_block_ids`` lists the request's blocks per KV cache group; called only if needed.
        """
        store = state.store
        end = self._storable_chunks(state, num_witnessed_tokens)
        tail = self._tail(state, num_witnessed_tokens) if state.transfer.stores else None
        if end <= store.next_chunk and not snapshots and tail is None:
            return None
        state.keys.extend(state.request.all_token_ids)
        is_all = self.settings.redis_admission == "all" or state.transfer.stores
        redis_keys = None if is_all else self._reused_keys(state, end)
        new = range(store.next_chunk, end)
        runs = self._runs(state, new, redis_keys, resolve_block_ids)
        runs += [
            self._run(state, snapshot.part, [snapshot.num_chunks - 1], [snapshot.block_ids])
            for snapshot in snapshots
            if self._is_new(state, snapshot.part, snapshot.num_chunks - 1, redis_keys)
        ]
        store.next_chunk = max(store.next_chunk, end)
        if tail is not None:
            store.has_tail = True
            runs += self._tail_runs(tail, resolve_block_ids(), state)
        if not runs:
            return None
        job = StoreJob(
            job_id=self.new_job_id(),
            request_id=state.request.request_id,
            runs=tuple(runs),
            redis_keys=redis_keys,
            adapter=adapter_of(state),
            claim=state.claim,
            is_awaited=state.transfer.stores,
        )
        self.index.plan(job.keys, job.job_id)
        self.tally.count("store_jobs")
        return job

    def ended(self, job: StoreJob, results: Sequence[JobResult]) -> None:
        """All ranks have reported, or none was asked: blocks were reused, or weights changed."""
        if all(result.outcome is Outcome.CANCELLED for result in results):
            self.tally.count("dropped_stores", amount=len(job.keys))
        self.index.settle(job.keys, job.job_id)

    def _storable_chunks(self, state: RequestState, num_witnessed_tokens: int) -> int:
        """Number of leading full chunks whose token ids are known: with asynchronous scheduling or
        speculation, the number of computed tokens runs ahead of the ids."""
        request = state.request
        known = request.num_tokens
        if not self.settings.store_generated:
            known = min(known, request.num_prompt_tokens)
        known -= self.settings.lookahead
        return int(min(num_witnessed_tokens, known) // self.settings.chunk_size)

    def _reused_keys(self, state: RequestState, end: int) -> frozenset[bytes]:
        """Keys to write to Redis: of chunks that this request is the second to use, and of those
        used more often which the CPU tier has lost, since Redis may have lost them too."""
        new = state.keys.keys[state.store.num_counted : end]
        state.store.num_counted = max(state.store.num_counted, end)
        times, known = dict[bytes, int](), self._times_used
        for key in new:
            times[key] = known[key] = known.get(key, 0) + 1
        again = [key for key, n in times.items() if n >= 2]
        num_parts = len(self.settings.parts)
        return frozenset(
            key
            for number in range(num_parts)
            for again_key, key in zip(again, keys_of_part(again, number, num_parts), strict=True)
            if times[again_key] == 2 or key not in self.index
        )

    def _runs(
        self,
        state: RequestState,
        new: range,
        redis_keys: frozenset[bytes] | None,
        resolve_block_ids: Callable[[], BlockTables],
    ) -> list[PartRun]:
        """Per part, the ``new`` chunks whose blocks still exist. States come as snapshots."""
        block_ids: BlockTables | None = None
        runs = []
        for number, part in enumerate(self.settings.parts):
            chunks = [i for i in new if self._is_new(state, number, i, redis_keys)]
            if part.rule is Rule.STATE:
                continue
            if part.rule is not Rule.PREFIX:
                num_tokens, junction = state.request.num_prompt_tokens, state.store.junction
                need = partial(self._ends.needs, num_tokens, junction, part)
                chunks = [i for i in chunks if need(i)]
            if not chunks:
                continue
            block_ids = block_ids if block_ids is not None else resolve_block_ids()
            size, per_chunk = (
                self.settings.chunk_size,
                self.settings.chunk_size // part.block_size,
            )
            blocks = [blocks_between(part, block_ids, i * size, (i + 1) * size) for i in chunks]
            there = [are_there(each, per_chunk) for each in blocks]
            chunks, blocks = list(compress(chunks, there)), list(compress(blocks, there))
            if chunks:
                runs.append(self._run(state, number, chunks, blocks))
        return runs

    def _tail(self, state: RequestState, num_witnessed_tokens: int) -> Tail | None:
        """The tail of a transferred prompt, once computed and not yet planned."""
        tail = state.keys.tail
        if tail is None or state.store.has_tail or num_witnessed_tokens < tail.end:
            return None
        return tail

    def _tail_runs(self, tail: Tail, block_ids: BlockTables, state: RequestState) -> list[PartRun]:
        """Per part, what a load that ends with the tail needs; nothing if any part has lost blocks.
        Leaves out parts that the CPU tier has."""
        parts, size, runs = self.settings.parts, self.settings.chunk_size, list[PartRun]()
        start, num_parts, num_owners = tail.chunk * size, len(parts), self.index.num_owners
        for number, part in enumerate(parts):
            key = part_key(tail.key, number, num_parts)
            first = first_token_to_load(part, start, tail.end)
            blocks = blocks_between(part, block_ids, first, tail.end)
            if not are_there(blocks, -(-tail.end // part.block_size) - first // part.block_size):
                return []
            if first < tail.end and key not in self.index:
                run = state.run(
                    *(parts, number, (tail.chunk,), (key,), blocks, num_owners(number)),
                    skip_blocks=(first - start) // part.block_size,
                    tail_tokens=tail.end - start,
                )
                runs.append(run)
        return runs

    def _is_new(
        self, state: RequestState, part: int, chunk: int, redis_keys: frozenset[bytes] | None
    ) -> bool:
        key = part_key(state.keys.keys[chunk], part, len(self.settings.parts))
        if key == state.audit.key:  # an audit must not compare the chunk with itself
            return False
        return key not in self.index or (redis_keys is not None and key in redis_keys)

    def _run(
        self, state: RequestState, part: int, chunks: list[int], blocks: list[BlockIds]
    ) -> PartRun:
        """``blocks``: per chunk, then per group."""
        keys, parts = state.keys.keys, self.settings.parts
        own = keys_of_part([keys[chunk] for chunk in chunks], part, len(parts))
        by_group = tuple(tuple(chain.from_iterable(group)) for group in zip(*blocks, strict=True))
        return state.run(parts, part, chunks, own, by_group, self.index.num_owners(part))


def adapter_of(state: RequestState) -> AdapterRef | None:
    """The adapter that must have computed the request's KV."""
    identity = state.keys.identity
    return AdapterRef(identity.lora_number, identity.lora) if identity.lora is not None else None
