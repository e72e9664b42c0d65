"""Which blocks of vLLM's paged cache hold KV that this connector saw come about, and whose it is.

vLLM's own evidence is too weak to store by: its prefix cache names an adapter by its path and an
image by its client's word, and ``num_computed_tokens`` may be an intention, such as another
connector's load that was aborted. So a block counts only from the step that computes it, or from
the load of ours that filled it, until vLLM hands it out again. Then vLLM calls back
(``BlockPool.unpin_blocks``): whoever asked for the block, and whatever for.

The *lineage* of a block says what its KV was computed from: the key that the key of its chunk is
chained to. It names the request's identity and all tokens before the chunk. vLLM's block hash
vouches for the tokens inside the chunk, as it is a SHA-256 of them; lineages name them too where it
is not. It says nothing of the token after a block, from which the KV of a drafter's head follows:
vLLM may put together blocks of several requests that went on differently. Lineages name it.

A request is *witnessed* as far as its leading blocks are of its own lineage, and then as far as it
is computed from there. After a gap nothing is, until it begins again: what follows was computed on
top of it, and with asynchronous scheduling vLLM loses a token of a request whose gap is found out.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import compress
from operator import ne
from typing import TYPE_CHECKING

from blake3 import blake3

from lmcache_connector.keys.request_keys import Tail
from lmcache_connector.kv_parts.blocks import NULL_BLOCK
from lmcache_connector.kv_parts.part import Rule, keys_of_part
from lmcache_connector.plans import LoadJob
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import KVCacheBlock, KVCacheManager


class BlockWitness:
    """Remembers the lineage of every block that is vouched for.

    Owns the witness part of every request's state. O(1) per block, once per block. ``reused``:
    blocks once vouched for that vLLM has handed out.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._chunk_size = settings.chunk_size
        self._lookahead = settings.lookahead
        self._parts = settings.parts
        # Their blocks fill up one by one; those of states are told of.
        self._group_sizes = {
            group: part.block_size
            for part in settings.parts
            if part.rule is not Rule.STATE
            for group in part.groups
        }
        self._state_sizes = {
            group: part.block_size
            for part in settings.parts
            if part.rule is Rule.STATE
            for group in part.groups
        }
        self._least_block = min([*self._group_sizes.values(), settings.chunk_size])
        self._names_tokens = settings.weak_block_hashes
        self._manager: KVCacheManager | None = None
        self._lineages: dict[int, bytes] = {}
        self._pinned: dict[int, list[KVCacheBlock]] = {}  # by the list's id()
        self.reused: set[int] = set()

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM's cache manager; until then nothing is witnessed."""
        self._manager = manager

    @property
    def hash_block_size(self) -> int:
        """Tokens that one of vLLM's block hashes stands for."""
        return (
            self._least_block if self._manager is None else self._manager.block_pool.hash_block_size
        )

    @property
    def num_blocks(self) -> int:
        """Of vLLM's cache."""
        return len(self._manager.block_pool.blocks) if self._manager is not None else 0

    @property
    def num_free_blocks(self) -> int:
        """Those that nobody holds."""
        return self._manager.block_pool.get_num_free_blocks() if self._manager is not None else 0

    def __len__(self) -> int:
        """Blocks that are vouched for."""
        return len(self._lineages)

    def forget(self) -> None:
        """Vouch for no block that was filled until now."""
        self._lineages.clear()

    def forget_all(self) -> None:
        """Nor know of any store that reads some: all blocks are vLLM's again."""
        self.forget()
        self.reused.clear()
        for blocks in list(self._pinned.values()):
            self.unpin(blocks)

    def break_off(self, state: RequestState) -> None:
        """Nothing of the request counts any more, until it begins again."""
        state.witness.num_tokens = state.witness.num_vouched = state.witness.due_at = 0
        state.witness.has_gap = True

    def look_again(self, states: Iterable[RequestState]) -> None:
        """What was sure of these requests may be so no more."""
        for state in states:
            state.witness.due_at = 0

    def disown(self) -> None:
        """What was loaded into these blocks may be wrong: no further request shall hit it, not in
        vLLM's own prefix cache either."""
        if self._manager is not None:
            self._manager.block_pool.evict_blocks(set(self._lineages))
        self.forget()

    def take_reused(self) -> set[int]:
        """``reused`` since the last call.

        Nothing is written to them before the step being planned.
        """
        reused, self.reused = self.reused, set()
        return reused

    # -- blocks that stores read -----------------------------------------------------------------

    def pin(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        """Nobody is handed these blocks until :meth:`unpin` of the same list."""
        blocks = self._by_id(block_ids)
        if blocks and self._manager is not None:
            self._manager.block_pool.touch(blocks)
            self._pinned[id(blocks)] = blocks
        return blocks

    def unpin(self, blocks: list[KVCacheBlock]) -> None:
        """Those that are free now are handed out after all other free blocks."""
        if self._manager is not None and self._pinned.pop(id(blocks), []):
            self._manager.block_pool.unpin_blocks(reversed(blocks), self._on_reuse)

    # -- requests --------------------------------------------------------------------------------

    def due(
        self,
        num_scheduled_tokens: Mapping[str, int],
        states: Mapping[str, RequestState],
        offers: Container[str],
    ) -> list[RequestState]:
        """The requests of the step being planned that :meth:`scheduled` is to be called for: that
        fill a block, or are in ``offers``. The others only go on inside a block.

        A decode step has many of those. A look at one costs no call.
        """
        due = []
        for request_id, num_tokens in num_scheduled_tokens.items():
            if (state := states.get(request_id)) is None:
                continue
            witness, start = state.witness, state.request.num_computed_tokens
            end = start + num_tokens
            if end >= witness.due_at or request_id in offers:
                due.append(state)
            elif not witness.has_gap:
                if start <= (witness.num_tokens or 0):
                    witness.num_tokens = end
                else:
                    due.append(state)
        return due

    def scheduled(self, state: RequestState, num_tokens: int, *, is_sure: bool = False) -> bool:
        """The step being planned computes ``num_tokens`` more of the request. True: there may be
        more blocks now that are whole.

        ``is_sure``: further steps will compute their tokens of it, too, from what its keys name.
        """
        if self._manager is None:  # nobody would tell of blocks that are reused
            return False
        witness, start = state.witness, state.request.num_computed_tokens
        before, is_first = witness.num_tokens or 0, witness.num_tokens is None
        if witness.num_tokens is None:
            witness.num_tokens = self._begin(state, start)
        witness.has_gap |= start > witness.num_tokens
        if not witness.has_gap:
            witness.num_tokens = start + num_tokens
        has_more = self._vouch(state, witness.num_tokens)
        witness.due_at = self._next_due(state) if is_sure else 0
        tail = state.keys.tail
        if tail is not None and before < tail.end <= witness.num_tokens:
            has_more = True
            self._vouch_for_tail(state, tail)
        return has_more or is_first

    def finished(self, state: RequestState, num_computed_tokens: int) -> int:
        """Of the tokens that were computed: how many are witnessed. Steps not yet run do not
        count."""
        num_tokens = min(num_computed_tokens, state.witness.num_tokens or 0)
        self._vouch(state, num_tokens)
        return num_tokens

    def computes_state(
        self, state: RequestState, group: int, block_id: int, num_tokens: int
    ) -> bool:
        """The step being planned leaves in this block the state of a recurrent group after so many
        tokens, if the request is witnessed up to there. Whether it is."""
        witness, size = state.witness, self._state_sizes[group]
        is_witnessed = not witness.has_gap and num_tokens <= (witness.num_tokens or 0)
        if is_witnessed and num_tokens % size == 0 and self._manager is not None:
            state.keys.extend(state.request.all_token_ids)
            end = num_tokens // size
            block = self._manager.block_pool.blocks[block_id]
            self._remember([block], self._lineages_of(state, size, end - 1, end))
        return is_witnessed

    def loaded(self, state: RequestState, job: LoadJob, num_chunks: int) -> None:
        """The leading ``num_chunks`` of the job are in the request's blocks, on all ranks."""
        num_parts = len(self._parts)
        for run in job.runs:
            count, num_chunks = num_chunks, num_chunks - len(run.keys)
            if count <= 0 or (count < len(run.keys) and num_parts > 1):
                return
            chunks = run.chunks[:count]
            own = state.keys.loadable[chunks[0] : chunks[-1] + 1]
            if tuple(keys_of_part(own, run.part, num_parts)) != run.keys[:count]:
                return  # since a reset the request has other keys
            size = self._parts[run.part].block_size
            has_tail = run.tail_tokens > 0 and count >= len(run.keys)
            end_token = chunks[-1] * self._chunk_size + (
                run.tail_tokens if has_tail else self._chunk_size
            )
            end = end_token // size
            first = chunks[0] * self._chunk_size // size + run.skip_blocks
            if self._parts[run.part].rule is Rule.STATE:
                first = end - 1
            lineages = self._lineages_of(state, size, first, end)
            if end_token % size:
                lineages.append(own[-1])
            for block_ids in run.block_ids:
                self._remember(self._by_id(block_ids[: len(lineages)]), lineages)

    # -- details ---------------------------------------------------------------------------------

    def _next_due(self, state: RequestState) -> int:
        witness, tail = state.witness, state.keys.tail
        if witness.has_gap:
            return sys.maxsize
        due_at = (witness.num_vouched // self._least_block + 1) * self._least_block
        if tail is not None and (witness.num_tokens or 0) < tail.end:
            due_at = min(due_at, tail.end)
        return due_at

    def _begin(self, state: RequestState, start: int) -> int:
        """The request begins, or begins again, with ``start`` tokens that vLLM says are there: how
        many of them are witnessed."""
        state.keys.extend(state.request.all_token_ids)
        start = min(start, state.request.num_tokens - self._lookahead)  # drafts may be ahead of it
        sizes = self._group_sizes | self._state_sizes
        num_tokens = min(self._own_tokens(state, *group, start) for group in sizes.items())
        state.witness.num_vouched = min(start, num_tokens)
        return state.witness.num_vouched

    def _own_tokens(self, state: RequestState, group: int, size: int, start: int) -> int:
        """The tokens before the first block in this group that is not the request's own."""
        num_blocks = -(-start // size)
        blocks = self._blocks(state, group, 0, num_blocks)
        held = [self._lineages.get(block.block_id) for block in blocks]
        own = self._lineages_of(state, size, 0, num_blocks)
        if (tail := state.keys.loaded_tail) is not None and start == tail.end and start % size:
            own[-1] = tail.key
        if held != own:
            differ = map(ne, held, own)
            strange = (
                i
                for i, differs in enumerate(differ)
                if differs and blocks[i].block_id != NULL_BLOCK
            )
            num_blocks = next(strange, num_blocks if len(held) == len(own) else 0)
        return num_blocks * size

    def _vouch(self, state: RequestState, num_tokens: int) -> bool:
        """For the blocks full of tokens whose KV is known: drafts may be rejected. True: for more
        than before."""
        before = state.witness.num_vouched
        after = int(min(num_tokens, state.request.num_tokens - self._lookahead))
        if after // self._least_block <= before // self._least_block:
            return False
        state.keys.extend(state.request.all_token_ids)
        for group, size in self._group_sizes.items():
            first, end = before // size, after // size
            blocks = self._blocks(state, group, first, end)
            self._remember(blocks, self._lineages_of(state, size, first, end))
        state.witness.num_vouched = after
        return True

    def _vouch_for_tail(self, state: RequestState, tail: Tail) -> None:
        """It may end inside a block. That vLLM hands that out again ends its store, too."""
        for group, size in self._group_sizes.items():
            first = tail.end // size
            if tail.end % size and (first + 1) * size > state.witness.num_vouched:
                self._remember(self._blocks(state, group, first, first + 1), [tail.key])

    def _remember(self, blocks: Sequence[KVCacheBlock], lineages: Sequence[bytes]) -> None:
        """vLLM forgets whom to call once it has called, or when it is told of another."""
        if self._manager is None:
            return
        if any(block.block_id == NULL_BLOCK for block in blocks):  # a window has left it behind
            there = [b.block_id != NULL_BLOCK for b in blocks]
            blocks, lineages = list(compress(blocks, there)), list(compress(lineages, there))
        pool = self._manager.block_pool
        pool.touch(blocks)
        pool.unpin_blocks(blocks, self._on_reuse)
        for block, lineage in zip(blocks, lineages, strict=True):
            self._lineages[block.block_id] = lineage

    def _on_reuse(self, block: KVCacheBlock) -> None:
        self._lineages.pop(block.block_id, None)
        self.reused.add(block.block_id)

    def _blocks(
        self, state: RequestState, group: int, first: int, end: int
    ) -> Sequence[KVCacheBlock]:
        if self._manager is None or end <= first:
            return ()
        blocks: Sequence[KVCacheBlock] = self._manager.get_blocks(state.request.request_id).blocks[
            group
        ]
        return blocks[first:end]

    def _by_id(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        if self._manager is None:
            return []
        return [self._manager.block_pool.blocks[i] for i in block_ids]

    def _lineages_of(self, state: RequestState, size: int, first: int, end: int) -> list[bytes]:
        """Of the request's blocks ``[first, end)``, in a group with blocks of ``size`` tokens."""
        if self._names_tokens or self._lookahead or state.keys.has_extras:
            return [self._full_lineage(state, size, block) for block in range(first, end)]
        lineages: list[bytes] = []
        per_chunk = self._chunk_size // size
        for chunk in range(first // per_chunk, -(-end // per_chunk)):
            begin = chunk * per_chunk
            count = min(end, begin + per_chunk) - max(first, begin)
            lineages += [state.keys.parent(chunk)] * count
        return lineages

    def _full_lineage(self, state: RequestState, size: int, block: int) -> bytes:
        """With all that else goes into the chunk's key, up to the end of what the block's KV
        follows from."""
        chunk = block // (self._chunk_size // size)
        start, end = chunk * self._chunk_size, (block + 1) * size + self._lookahead
        parent, more = state.keys.parent(chunk), state.keys.extras(start, end)
        first = start if self._names_tokens else end - self._lookahead
        more += array("I", state.request.all_token_ids[first:end]).tobytes()
        return bytes(blake3(parent + more).digest()) if more else parent
