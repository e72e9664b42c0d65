"""The scheduler's view of the chunks in the CPU tiers of all ranks, and of the chunks in use.

A chunk is *there* when every rank has it or can read it from its owner, and *planned* while store
jobs for it run. Both count as hits: a load waits for the store job of a planned chunk. If other
ranks store the chunk for some rank, the request waits for them before its load is planned. The
index may be outdated: chunks that a load does not find are computed. It is never outdated for
*firm* chunks: a rank evicts a chunk only after a plan has confirmed that the announcement of the
eviction has arrived here.

The scheduler tells workers what they cannot see: which chunks requests use (:class:`PrefixUses`). A
request served by vLLM's own prefix cache loads and stores nothing, but its prompt is in use, and
its hints apply to stored chunks. And a chunk found in memory is not looked up in Redis, so nothing
else would notice that Redis lacks it: see `worker.redis_writes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from lmcache_connector.kv_parts.hit import num_leading
from lmcache_connector.kv_parts.part import Part, Rule, keys_of_part, turn
from lmcache_connector.plans import CacheEvent, Claim, PrefixUse


class ChunkIndex:
    """All ``world_size`` ranks must hold a chunk or, if ranks read from each other, only those in
    the bit set ``needed(key)``: see :class:`Owners`."""

    def __init__(self, world_size: int) -> None:
        self._all_ranks = (1 << world_size) - 1
        self.needed: Callable[[bytes], int] | None = None
        self._num_owners: Sequence[int] = ()
        self._holders: dict[bytes, int] = {}  # key -> bit set of the ranks that hold it
        self._planned: dict[bytes, int] = {}  # key -> the latest store job for it
        self._leaving: dict[bytes, int] = {}  # key -> bit set of the ranks that will evict it
        self._num_leaving = [0] * world_size
        self.acked_leaving: tuple[int, ...] = ()

    def share(self, needed: Callable[[bytes], int], num_owners: Sequence[int]) -> None:
        """Ranks read from each other: see :class:`Owners`. ``num_owners`` is per part."""
        self.needed, self._num_owners = needed, num_owners

    def num_owners(self, part: int) -> int:
        """How many ranks take turns to store the part's KV that they all hold."""
        return self._num_owners[part] if self._num_owners else 1

    def __contains__(self, key: bytes) -> bool:
        return self.has_each((key,))[0]

    def has_each(self, keys: Iterable[bytes]) -> list[bool]:
        """``key in self`` for each key, in one pass because long prompts have hundreds."""
        holders, planned, all_ranks = self._holders, self._planned, self._all_ranks
        if self.needed is None:
            return [holders.get(key) == all_ranks or key in planned for key in keys]
        return [key in planned or self._is_there(key) for key in keys]

    def _is_there(self, key: bytes) -> bool:
        holders = self._holders.get(key, 0)
        if self.needed is None or holders == self._all_ranks:
            return holders == self._all_ranks
        needed = self.needed(key)
        return holders & needed == needed

    def planned_job(self, key: bytes) -> int:
        """The store job that a load of this chunk must wait for; 0 if there is none."""
        job_id = self._planned.get(key, 0)
        return 0 if job_id and self._is_there(key) else job_id

    def first_stored_elsewhere(self, keys: Sequence[bytes]) -> int:
        """Index of the first key whose chunk some rank is storing for other ranks, which cannot
        tell when the store has ended; ``len(keys)`` if there is none."""
        if (needed := self.needed) is None or not self._planned:
            return len(keys)
        stored = (self.planned_job(k) and needed(k) != self._all_ranks for k in keys)
        return next((i for i, is_stored in enumerate(stored) if is_stored), len(keys))

    def plan(self, keys: Iterable[bytes], job_id: int) -> None:
        """A store job for these chunks was planned."""
        for key in keys:
            self._planned[key] = job_id

    def settle(self, keys: Iterable[bytes], job_id: int) -> None:
        """A store job has ended (events have reported what it stored), or is cancelled."""
        for key in keys:
            if self._planned.get(key) == job_id:
                del self._planned[key]

    def forget_planned(self) -> None:
        """No store job is open any more, and the last plan may be lost."""
        self._planned.clear()
        self.acked_leaving = tuple(self._num_leaving)

    def take_acked(self) -> tuple[int, ...]:
        """Per rank, the number of known reports of leaving chunks, for the next plan; empty if
        unchanged since the last plan."""
        acked, self.acked_leaving = self.acked_leaving, ()
        return acked

    def num_firm(self, keys: Iterable[bytes]) -> int:
        """Number of leading chunks that all ranks hold, and no rank evicts before the next plan."""
        holders, leaving, all_ranks = self._holders, self._leaving, self._all_ranks
        return sum(
            1
            for _ in takewhile(
                lambda key: holders.get(key) == all_ranks and key not in leaving, keys
            )
        )

    def apply(self, rank: int, events: Iterable[CacheEvent], num_leaving: int = 0) -> None:
        """Process changes of a rank's CPU tier, in order. ``num_leaving``: number of this report
        among the rank's reports of leaving chunks; 0 for others. If one of these was lost, all of
        the rank's chunks count as leaving."""
        bit, known = 1 << rank, self._num_leaving[rank]
        if num_leaving > known + 1:
            self._leaving |= {key: self._leaving.get(key, 0) | bit for key in self._holders}
        for event in events:
            if not event.admitted:
                self.drop(rank, event.key)
                continue
            self._holders[event.key] = self._holders.get(event.key, 0) | bit
            if event.is_leaving:
                self._leaving[event.key] = self._leaving.get(event.key, 0) | bit
            else:
                self._stays(bit, event.key)
        if num_leaving > known:
            self._num_leaving[rank] = num_leaving
            self.acked_leaving = tuple(self._num_leaving)

    def drop(self, rank: int, key: bytes) -> None:
        """The rank lacks the chunk. If it neither had nor needs its own copy, it could not read the
        owner's: the chunk then counts as gone until it is stored again."""
        gone = 1 << rank
        if self.needed is not None and not (self.needed(key) | self._holders.get(key, 0)) & gone:
            gone |= self.needed(key)
        self._stays(gone, key)
        holders = self._holders.get(key, 0) & ~gone
        if holders:
            self._holders[key] = holders
        else:
            self._holders.pop(key, None)

    def _stays(self, bit: int, key: bytes) -> None:
        if self._leaving and (ranks := self._leaving.pop(key, 0) & ~bit):
            self._leaving[key] = ranks


class PrefixUses:
    """Collects uses of prompts for the next plan. ``new``: uses since the last plan. ``stores``:
    this instance stores."""

    def __init__(self, parts: Sequence[Part], index: ChunkIndex, *, stores: bool) -> None:
        self._parts = parts
        self._index = index
        self._stores = stores
        self.new: list[PrefixUse] = []

    def add(self, chunk_keys: Sequence[bytes], claim: Claim) -> None:
        """A new request has this prompt. O(chunks)."""
        keys: list[bytes] = []
        for number, part in enumerate(self._parts):
            own = keys_of_part(chunk_keys, number, len(self._parts))
            are_held = self._index.has_each(own)
            if part.rule is not Rule.PREFIX:
                keys += [key for key, is_held in zip(own, are_held, strict=True) if is_held]
                continue
            num_held = num_leading(are_held)
            num_owners = self._index.num_owners(number)
            last = dict[int, bytes]()  # per turn; a use covers all earlier chunks of the same owner
            for key in reversed(own[:num_held]):
                last.setdefault(turn(key, num_owners), key)
                if len(last) == num_owners:
                    break
            keys += last.values()
        if keys:
            self.new.append(PrefixUse(claim, tuple(keys), self._stores))

    def take(self) -> tuple[PrefixUse, ...]:
        new, self.new = tuple(self.new), []
        return new
