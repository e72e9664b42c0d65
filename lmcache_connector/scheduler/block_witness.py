"""Which blocks of vLLM's paged cache hold KV that this connector saw come about, and whose it is.

vLLM's own evidence is too weak to store by: its prefix cache names an adapter by its path and an
image by its client's word, and ``num_computed_tokens`` may be an intention, such as another
connector's load that was aborted. So a block counts only from the step that computes it, or from
the load of ours that filled it, until vLLM hands it out again. Then vLLM calls back
(``BlockPool.unpin_blocks``): whoever asked for the block, and whatever for.

The *lineage* of a block says what its KV was computed from: the key that the key of its chunk is
chained to. It names the request's identity and all tokens before the chunk. vLLM's block hash
vouches for the tokens inside the chunk, as it is a SHA-256 of them; lineages name them too where it
is not.

A request is *witnessed* as far as its leading blocks are of its own lineage, and then as far as it
is computed from there. After a gap nothing is, until it begins again: what follows was computed on
top of it, and with asynchronous scheduling vLLM loses a token of a request whose gap is found out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import ne
from typing import Any, Protocol

from blake3 import blake3

from lmcache_connector.plans import LoadJob
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings


class Block(Protocol):
    """vLLM's ``KVCacheBlock``."""

    block_id: int


class BlockPool(Protocol):
    """vLLM's, as far as it is used here."""

    blocks: Sequence[Block]

    def touch(self, blocks: Sequence[Block]) -> None:
        """Take a reference to each."""
        ...

    def unpin_blocks(self, blocks: Iterable[Block], on_reuse: Callable[[Block], None]) -> None:
        """Give it back, and be called before the block is written by anybody else."""
        ...

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Let no further request hit them."""
        ...


class CacheManager(Protocol):
    """vLLM's ``KVCacheManager``, as far as it is used here."""

    block_pool: BlockPool

    def get_blocks(self, request_id: str) -> Any:
        """``blocks`` of the answer lists the request's blocks per KV cache group."""
        ...


class BlockWitness:
    """Remembers the lineage of every block that is vouched for.

    Owns the witness part of every request's state. O(1) per block, once per block.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._block_size = settings.block_sizes[0]
        self._per_chunk = settings.chunk_size // self._block_size
        self._names_tokens = settings.weak_block_hashes
        self._manager: CacheManager | None = None
        self._lineages: dict[int, bytes] = {}
        self._reused: set[int] = set()
        self._kept: list[Block] = []

    def bind(self, manager: CacheManager) -> None:
        """vLLM's cache manager; until then nothing is witnessed."""
        self._manager = manager

    def __len__(self) -> int:
        """Blocks that are vouched for."""
        return len(self._lineages)

    def forget(self) -> None:
        """Vouch for no block that was filled until now."""
        self._lineages.clear()

    def break_off(self, state: RequestState) -> None:
        """Nothing of the request counts any more, until it begins again."""
        state.witness.num_tokens = state.witness.num_blocks = 0
        state.witness.has_gap = True

    def disown(self) -> None:
        """What was loaded into these blocks may be wrong: no further request shall hit it, not in
        vLLM's own prefix cache either."""
        if self._manager is not None:
            self._manager.block_pool.evict_blocks(set(self._lineages))
        self.forget()

    def take_reused(self) -> set[int]:
        """Blocks once vouched for that vLLM has handed out since the last call.

        Nothing is written to them before the step being planned.
        """
        reused, self._reused = self._reused, set()
        return reused

    # -- blocks that stores read -----------------------------------------------------------------

    def keep(self, block_ids: Iterable[int]) -> None:
        """Nobody is handed these blocks until :meth:`put_last`."""
        if self._manager is not None:
            blocks = [self._manager.block_pool.blocks[i] for i in block_ids]
            self._manager.block_pool.touch(blocks)
            self._kept += blocks

    def put_last(self) -> None:
        """What was kept, and is free, is handed out after all other free blocks. vLLM would take
        a finished request's blocks first where they are not in its prefix cache."""
        if self._kept and self._manager is not None:
            kept, self._kept = self._kept, []
            self._manager.block_pool.unpin_blocks(reversed(kept), self._on_reuse)

    # -- requests --------------------------------------------------------------------------------

    def scheduled(self, state: RequestState, num_tokens: int) -> bool:
        """The step being planned computes ``num_tokens`` more of the request. True: there may be
        more blocks now that are whole."""
        if self._manager is None:  # nobody would tell of blocks that are reused
            return False
        witness, start = state.witness, state.request.num_computed_tokens
        is_first = witness.num_tokens is None
        if witness.num_tokens is None:
            witness.num_tokens = self._begin(state, start)
        witness.has_gap |= start > witness.num_tokens
        if not witness.has_gap:
            witness.num_tokens = start + num_tokens
        return self._vouch(state, witness.num_tokens) or is_first

    def finished(self, state: RequestState, num_computed_tokens: int) -> int:
        """Of the tokens that were computed: how many are witnessed. Steps not yet run do not
        count."""
        num_tokens = min(num_computed_tokens, state.witness.num_tokens or 0)
        self._vouch(state, num_tokens)
        return num_tokens

    def loaded(self, state: RequestState, job: LoadJob, num_chunks: int) -> None:
        """The leading ``num_chunks`` of the job are in the request's blocks, on all ranks."""
        run = job.runs[0]
        first_chunk, end_chunk = run.chunks[0], run.chunks[0] + num_chunks
        if tuple(state.keys.keys[first_chunk:end_chunk]) != run.keys[:num_chunks]:
            return  # since a reset the request has other keys
        first, end = first_chunk * self._per_chunk + run.skip_blocks, end_chunk * self._per_chunk
        lineages = self._lineages_of(state, first, end)
        if self._manager is not None:
            blocks = self._manager.block_pool.blocks
            self._remember([blocks[i] for i in run.block_ids[0][: len(lineages)]], lineages)

    # -- details ---------------------------------------------------------------------------------

    def _begin(self, state: RequestState, start: int) -> int:
        """The request begins, or begins again, with ``start`` tokens that vLLM says are there: how
        many of them are witnessed."""
        state.keys.extend(state.request.all_token_ids)
        num_blocks = -(-start // self._block_size)
        held = [self._lineages.get(b.block_id) for b in self._blocks(state, 0, num_blocks)]
        own = self._lineages_of(state, 0, num_blocks)
        if held != own:
            num_blocks = next((i for i, differ in enumerate(map(ne, held, own)) if differ), 0)
        state.witness.num_blocks = num_blocks
        return min(start, num_blocks * self._block_size)

    def _vouch(self, state: RequestState, num_tokens: int) -> bool:
        """For the blocks full of tokens that are known: drafts may be rejected. True: for more than
        before."""
        first = state.witness.num_blocks
        end = int(min(num_tokens, state.request.num_tokens) // self._block_size)
        if end <= first:
            return False
        state.keys.extend(state.request.all_token_ids)
        self._remember(self._blocks(state, first, end), self._lineages_of(state, first, end))
        state.witness.num_blocks = end
        return True

    def _remember(self, blocks: Sequence[Block], lineages: Sequence[bytes]) -> None:
        """vLLM forgets whom to call once it has called, or when it is told of another."""
        if self._manager is None:
            return
        pool = self._manager.block_pool
        pool.touch(blocks)
        pool.unpin_blocks(blocks, self._on_reuse)
        for block, lineage in zip(blocks, lineages, strict=True):
            self._lineages[block.block_id] = lineage

    def _on_reuse(self, block: Block) -> None:
        self._lineages.pop(block.block_id, None)
        self._reused.add(block.block_id)

    def _blocks(self, state: RequestState, first: int, end: int) -> Sequence[Block]:
        if self._manager is None or end <= first:
            return ()
        blocks: Sequence[Block] = self._manager.get_blocks(state.request.request_id).blocks[0]
        return blocks[first:end]

    def _lineages_of(self, state: RequestState, first: int, end: int) -> list[bytes]:
        """Of the request's blocks ``[first, end)``."""
        if self._names_tokens or state.keys.has_extras:
            return [self._full_lineage(state, block) for block in range(first, end)]
        lineages: list[bytes] = []
        for chunk in range(first // self._per_chunk, -(-end // self._per_chunk)):
            begin = chunk * self._per_chunk
            count = min(end, begin + self._per_chunk) - max(first, begin)
            lineages += [state.keys.parent(chunk)] * count
        return lineages

    def _full_lineage(self, state: RequestState, block: int) -> bytes:
        """With all that else goes into the chunk's key, up to the block's end."""
        chunk = block // self._per_chunk
        start, end = chunk * self._per_chunk * self._block_size, (block + 1) * self._block_size
        parent, more = state.keys.parent(chunk), state.keys.extras(start, end)
        if self._names_tokens:
            more += array("I", state.request.all_token_ids[start:end]).tobytes()
        return bytes(blake3(parent + more).digest()) if more else parent
