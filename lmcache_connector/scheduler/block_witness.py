"""Which blocks of vLLM's paged cache this connector saw being filled, and for which request.

vLLM's own evidence is too weak to store by: its prefix cache identifies an adapter by its path and
an image by an id from the client, and ``num_computed_tokens`` may include another connector's load
that was aborted. So this connector *vouches* for a block only from the step that computes the
block, or from its own load that filled it, until vLLM reuses the block. vLLM then calls back
(through ``BlockPool.unpin_blocks``), whoever gets the block.

The *lineage* of a block names what its KV was computed from: the parent key of its chunk, which
covers the request's identity and all tokens before the chunk, and the images and embeddings from
the chunk's start to the block's end. vLLM's block hash, a SHA-256, vouches for the tokens there;
with a weaker hash the lineage covers these tokens too. The KV of a drafter's head also depends on
the token after the block, which the hash leaves out: vLLM may join blocks of requests that
continued differently. The lineage then covers that token.

A request is *witnessed* up to the end of those leading blocks that have its own lineage, and then
as far as it is computed from there. After a gap nothing is witnessed until the request begins
again: later KV builds on the gap, and with asynchronous scheduling vLLM loses a token of a request
in which another connector's load inside a step has failed.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import ne
from typing import TYPE_CHECKING

from blake3 import blake3

from lmcache_connector.keys.request_keys import Tail
from lmcache_connector.kv_parts.blocks import NULL_BLOCK
from lmcache_connector.kv_parts.part import BlockTables, Rule, keys_of_part
from lmcache_connector.plans import LoadJob
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings, StateOffer
from lmcache_connector.vllm_compat.api.names import evict_copies

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import KVCacheBlock, KVCacheManager

_MAX_EVICTED = 1024
_UNNAMED = b""
"""Lineage of a state whose key is not known yet."""


class BlockWitness:
    """Records the lineage of every block that is vouched for.

    Owns the witness part of every request's state. O(1) per block. ``reused``: blocks once vouched
    for that vLLM has handed out again.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._chunk_size = settings.chunk_size
        self._lookahead = settings.lookahead
        self._parts = settings.parts
        # Blocks of these groups fill up token by token; for states, vLLM names the blocks.
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
        self._stores = settings.stores
        self._unvouched_hits = Counter[bytes]()  # by key of the first chunk with such a block
        self._pinned: dict[int, list[KVCacheBlock]] = {}  # by the list's id()
        self.reused: set[int] = set()

    def bind(self, manager: KVCacheManager) -> None:
        """Set vLLM's cache manager; nothing is witnessed before."""
        self._manager = manager

    @property
    def hash_block_size(self) -> int:
        """Tokens per vLLM block hash."""
        return (
            self._least_block if self._manager is None else self._manager.block_pool.hash_block_size
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in vLLM's cache."""
        return len(self._manager.block_pool.blocks) if self._manager is not None else 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that vLLM can hand out."""
        return self._manager.block_pool.get_num_free_blocks() if self._manager is not None else 0

    def forget(self) -> None:
        """Vouch for no block filled so far."""
        self._lineages.clear()
        self._unvouched_hits.clear()

    def forget_all(self) -> None:
        """Also drop all pins."""
        self.forget()
        self.reused.clear()
        for blocks in list(self._pinned.values()):
            self.unpin(blocks)

    def break_off(self, state: RequestState) -> None:
        """Witness nothing more of the request until it begins again."""
        state.witness.num_tokens = state.witness.num_vouched = state.witness.due_at = 0
        state.witness.has_gap = True

    def recheck_next_step(self, states: Iterable[RequestState]) -> None:
        """Check these requests again in the next step."""
        for state in states:
            state.witness.due_at = 0

    def invalidate_all(self) -> None:
        """The KV in all vouched blocks may be wrong: no request may hit it any more, neither here
        nor in vLLM's prefix cache."""
        if self._manager is not None:
            self._manager.block_pool.evict_blocks(set(self._lineages))
        self.forget()

    def take_reused(self) -> set[int]:
        """``reused`` since the last call. Nothing writes to these blocks before the step being
        planned."""
        reused, self.reused = self.reused, set()
        return reused

    # -- blocks that stores read -----------------------------------------------------------------

    def pin(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        """Keep vLLM from handing out these blocks until :meth:`unpin` of the returned list."""
        blocks = self._by_id(block_ids)
        if blocks and self._manager is not None:
            self._manager.block_pool.touch(blocks)
            self._pinned[id(blocks)] = blocks
        return blocks

    def unpin(self, blocks: list[KVCacheBlock]) -> None:
        """Of these blocks, vLLM hands out the free ones after all other free blocks."""
        if self._manager is not None and self._pinned.pop(id(blocks), []):
            self._manager.block_pool.unpin_blocks(reversed(blocks), self._on_reuse)

    # -- requests --------------------------------------------------------------------------------

    def due(
        self,
        num_scheduled_tokens: Mapping[str, int],
        states: Mapping[str, RequestState],
        offers: Container[str],
    ) -> list[RequestState]:
        """The requests of the step being planned that need :meth:`scheduled`: those that fill a
        block or are in ``offers``. The others, most of a decode step, stay inside a block and cost
        no call.
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
        """The step being planned computes ``num_tokens`` more of the request. True: more blocks
        may be full now.

        ``is_sure``: later steps, too, will compute the request's tokens from what its keys name.
        """
        if self._manager is None:  # vLLM would not report reused blocks
            return False
        witness, start = state.witness, state.request.num_computed_tokens
        before, is_first = witness.num_tokens or 0, witness.num_tokens is None
        if witness.num_tokens is None:
            witness.num_tokens = self._begin(state, start)
            if num_tokens and witness.num_tokens < start:
                self._evict_unvouched(state, witness.num_tokens, start)
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

    def ended(self, state: RequestState, block_ids: BlockTables) -> None:
        """vLLM takes the request's blocks back. If it hit blocks that were evicted, those that it
        filled behind them are evicted, too: later requests would find them before stored ones."""
        if self._manager is not None and state.witness.has_evicted:
            unvouched = set(chain(*block_ids)) - self._lineages.keys() - {NULL_BLOCK}
            self._manager.block_pool.evict_blocks(unvouched)

    def finished(self, state: RequestState, num_computed_tokens: int) -> int:
        """How many of the computed tokens are witnessed, leaving out steps not yet run."""
        num_tokens = min(num_computed_tokens, state.witness.num_tokens or 0)
        self._vouch(state, num_tokens)
        return num_tokens

    def states(
        self, state: RequestState, offers: Sequence[StateOffer]
    ) -> dict[tuple[int, int], int]:
        """Blocks of recurrent states at block ends, which the request's steps up to the one being
        planned leave there, by group and number of tokens. Vouches for them. A state whose key
        depends on a later token waits for it in ``unnamed``."""
        found = dict[tuple[int, int], int]()
        witness, manager = state.witness, self._manager
        if manager is None or witness.has_gap or not (offers or witness.unnamed):
            return found
        known = state.request.num_tokens - self._lookahead
        waiting = [offer for offer in witness.unnamed if self._lineages.get(offer[1]) == _UNNAMED]
        witness.unnamed = []
        state.keys.extend(state.request.all_token_ids)
        for offer in chain(waiting, offers):
            group, block_id, num_tokens = offer
            end, rest = divmod(num_tokens, self._state_sizes[group])
            if rest or num_tokens > (witness.num_tokens or 0):
                continue
            lineages = [_UNNAMED]
            if num_tokens > known:
                witness.unnamed.append(offer)
            else:
                lineages = self._lineages_of(state, self._state_sizes[group], end - 1, end)
                found[group, num_tokens] = block_id
            self._remember([manager.block_pool.blocks[block_id]], lineages)
        return found

    def loaded(self, state: RequestState, job: LoadJob, num_chunks: int) -> None:
        """All ranks have loaded the first ``num_chunks`` of the job into the request's blocks."""
        num_parts = len(self._parts)
        for run in job.runs:
            count, num_chunks = num_chunks, num_chunks - len(run.keys)
            if count <= 0 or (count < len(run.keys) and num_parts > 1):
                return
            chunks = run.chunks[:count]
            own = state.keys.loadable[chunks[0] : chunks[-1] + 1]
            if tuple(keys_of_part(own, run.part, num_parts)) != run.keys[:count]:
                return  # the request got other keys after the load was planned
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
        """The request begins, or begins again, with ``start`` tokens present according to vLLM.
        Returns how many of them are witnessed."""
        state.keys.extend(state.request.all_token_ids)
        start = min(start, state.request.num_tokens - self._lookahead)  # may include drafts
        sizes = self._group_sizes | self._state_sizes
        num_tokens = min(self._own_tokens(state, *group, start) for group in sizes.items())
        state.witness.num_vouched = min(start, num_tokens)
        return state.witness.num_vouched

    def _evict_unvouched(self, state: RequestState, first: int, end: int) -> None:
        """Evict blocks of tokens ``[first, end)`` that nothing vouches for from vLLM's prefix
        cache: while requests hit them there, nothing of what follows could be stored. Requests
        that bypass the tiers, and other connectors, bring such blocks back: so a prefix is evicted
        at its first such hit, the second, the fourth, the eighth and so on; 1,024 prefixes at most.
        vLLM has copied a block inside which its hit ends: such a hit is left alone."""
        sizes = self._group_sizes | self._state_sizes
        chunks = state.keys.keys[first // self._chunk_size :]
        if self._manager is None or not chunks or any(end % size for size in sizes.values()):
            return
        chunk, hits = chunks[0], self._unvouched_hits
        if not self._stores or (chunk not in hits and len(hits) == _MAX_EVICTED):
            return
        hits[chunk] += 1
        if hits[chunk].bit_count() > 1:
            return
        state.witness.has_evicted = True
        for group, size in sizes.items():
            for block in self._blocks(state, group, first // size, end // size):
                if block.block_id not in self._lineages:
                    evict_copies(self._manager.block_pool, block, kept=self._lineages)

    def _own_tokens(self, state: RequestState, group: int, size: int, start: int) -> int:
        """Tokens before the first block of this group that lacks the request's own lineage."""
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
        """Vouch for blocks filled with known tokens; drafts may be rejected. True if there are
        more than before."""
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
        """Vouch for a last block that the tail fills in part, so that its reuse ends the store."""
        for group, size in self._group_sizes.items():
            first = tail.end // size
            if tail.end % size and (first + 1) * size > state.witness.num_vouched:
                self._remember(self._blocks(state, group, first, first + 1), [tail.key])

    def _remember(self, blocks: Sequence[KVCacheBlock], lineages: Sequence[bytes]) -> None:
        """Record lineages, and register for each block's reuse: vLLM calls back once only, and
        keeps one callback per block."""
        if self._manager is None:
            return
        if any(block.block_id == NULL_BLOCK for block in blocks):  # outside the window
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
        """Lineages of the request's blocks ``[first, end)`` of ``size`` tokens each."""
        if self._names_tokens or self._lookahead or state.keys.identity.has_extras:
            return [self._full_lineage(state, size, block) for block in range(first, end)]
        lineages: list[bytes] = []
        per_chunk = self._chunk_size // size
        for chunk in range(first // per_chunk, -(-end // per_chunk)):
            begin = chunk * per_chunk
            count = min(end, begin + per_chunk) - max(first, begin)
            lineages += [state.keys.parent(chunk)] * count
        return lineages

    def _full_lineage(self, state: RequestState, size: int, block: int) -> bytes:
        """The parent key with all other inputs of the block's KV, hashed."""
        chunk = block // (self._chunk_size // size)
        start, end = chunk * self._chunk_size, (block + 1) * size + self._lookahead
        parent, more = state.keys.parent(chunk), state.keys.identity.extras(start, end)
        first = start if self._names_tokens else end - self._lookahead
        more += array("I", state.request.all_token_ids[first:end]).tobytes()
        return bytes(blake3(parent + more).digest()) if more else parent
