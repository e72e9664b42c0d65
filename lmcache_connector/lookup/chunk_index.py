"""Which chunks the CPU tiers of all ranks hold, as far as the scheduler knows, and which of them
requests want.

A chunk is *there* when every rank has it, or can read it from its owner, and *planned* while store
jobs for it run. Both count as hits: workers run jobs in order, so a load planned after a store
finds what it stored. Where another rank stores it, a request waits for the end of that. The index
may be late: a load that finds a chunk gone fails and is recomputed. It is never late for chunks
that it calls *firm*: no rank evicts one before a plan says that its announcement has been heard
here.

The workers are told of two things that they do not see. A request that vLLM's own prefix cache
serves loads nothing and stores nothing new, but its prompt is in use, and its hints hold for chunks
stored before it (:class:`PrefixUses`). And a chunk found in memory is not asked for in Redis, so
nobody would notice that Redis lacks it (:class:`WantedChunks`; see `worker.offers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from lmcache_connector.bounded import Latest
from lmcache_connector.kv_parts.hit import num_leading
from lmcache_connector.kv_parts.part import Part, Rule, keys_of_part, turn
from lmcache_connector.plans import CacheEvent, Claim, PrefixUse


class ChunkIndex:
    """``world_size``: how many ranks must hold a chunk for it to be there. ``needed``: which of
    them, as a bit set, where some read it from others: see :class:`Owners`."""

    def __init__(self, world_size: int) -> None:
        self._all_ranks = (1 << world_size) - 1
        self.needed: Callable[[bytes], int] | None = None
        self._num_owners: Sequence[int] = ()
        self._holders: dict[bytes, int] = {}  # key -> bit set of the ranks that hold it
        self._planned: dict[bytes, int] = {}  # key -> the latest store job for it
        self._leaving: dict[bytes, int] = {}  # key -> bit set of the ranks that will evict it
        self._num_leaving = [0] * world_size
        self.heard_leaving: tuple[int, ...] = ()

    def share(self, needed: Callable[[bytes], int], num_owners: Sequence[int]) -> None:
        """Ranks read from each other: see :class:`Owners`. ``num_owners``: by part."""
        self.needed, self._num_owners = needed, num_owners

    def num_owners(self, part: int) -> int:
        """How many ranks take turns to store what they hold alike of this part."""
        return self._num_owners[part] if self._num_owners else 1

    def __len__(self) -> int:
        """Chunks that at least one rank holds."""
        return len(self._holders)

    def __contains__(self, key: bytes) -> bool:
        return self.has_each((key,))[0]

    def has_each(self, keys: Iterable[bytes]) -> list[bool]:
        """``key in self`` for each key, in one pass: long prompts have hundreds."""
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
        """The store job a load of this chunk must wait for, 0 if it is already there."""
        return 0 if self._is_there(key) else self._planned.get(key, 0)

    def first_stored_elsewhere(self, keys: Sequence[bytes]) -> int:
        """The place of the first that some rank is storing for others too, who cannot tell when
        that has ended; their number if there is none."""
        if (needed := self.needed) is None or not self._planned:
            return len(keys)
        stored = (self.planned_job(k) and needed(k) != self._all_ranks for k in keys)
        return next((i for i, is_stored in enumerate(stored) if is_stored), len(keys))

    def plan(self, keys: Iterable[bytes], job_id: int) -> None:
        """Learn that a store job for these chunks was planned."""
        for key in keys:
            self._planned[key] = job_id

    def settle(self, keys: Iterable[bytes], job_id: int) -> None:
        """Learn that a store job has ended on all ranks; events have told what it stored."""
        for key in keys:
            if self._planned.get(key) == job_id:
                del self._planned[key]

    def forget_planned(self) -> None:
        """No store job is under way any more, and the last plan may be lost."""
        self._planned.clear()
        self.heard_leaving = tuple(self._num_leaving)

    def take_heard(self) -> tuple[int, ...]:
        """Of each rank, how many reports of leaving chunks are known here, for the next plan; empty
        if as many as for the last one."""
        heard, self.heard_leaving = self.heard_leaving, ()
        return heard

    def num_firm(self, keys: Iterable[bytes]) -> int:
        """How many leading ones of these all ranks hold, and none evicts before the next plan."""
        holders, leaving, all_ranks = self._holders, self._leaving, self._all_ranks
        return sum(
            1
            for _ in takewhile(
                lambda key: holders.get(key) == all_ranks and key not in leaving, keys
            )
        )

    def apply(self, rank: int, events: Iterable[CacheEvent], num_leaving: int = 0) -> None:
        """Learn what entered and left a rank's CPU tier, in order, and what will leave it.
        ``num_leaving``: how many reports of that rank have told of such chunks with this one; 0: it
        does not. If one of them was lost, it may have been of any chunk."""
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
            self.heard_leaving = tuple(self._num_leaving)

    def drop(self, rank: int, key: bytes) -> None:
        """Learn that this rank does not hold the chunk, or could not read it where it is: then it
        is as good as gone, until it is stored again. One that has held it need not have read it."""
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

    @property
    def num_planned(self) -> int:
        return len(self._planned)


class PrefixUses:
    """Collects uses for the next plan. ``parts``: the model's. ``new``: since the last one."""

    def __init__(self, parts: Sequence[Part], index: ChunkIndex) -> None:
        self._parts = parts
        self._index = index
        self.new: list[PrefixUse] = []

    def add(self, chunk_keys: Sequence[bytes], claim: Claim) -> None:
        """A new request has this prompt. O(its chunks)."""
        keys: list[bytes] = []
        for number, part in enumerate(self._parts):
            own = keys_of_part(chunk_keys, number, len(self._parts))
            are_held = self._index.has_each(own)
            if part.rule is not Rule.PREFIX:
                keys += [key for key, is_held in zip(own, are_held, strict=True) if is_held]
                continue
            num_held = num_leading(are_held)
            num_owners = self._index.num_owners(number)
            last = dict[int, bytes]()  # of each turn: it builds on all the others of its owners
            for key in reversed(own[:num_held]):
                last.setdefault(turn(key, num_owners), key)
                if len(last) == num_owners:
                    break
            keys += last.values()
        if keys:
            self.new.append(PrefixUse(claim, tuple(keys)))

    def take(self) -> tuple[PrefixUse, ...]:
        """Since the last call."""
        new, self.new = tuple(self.new), []
        return new


INTERVAL_SECONDS = 15.0
"""A chunk is told of once in that time, however many requests want it."""
_MAX_PER_STEP = 256
_MAX_TRACKED = 1 << 16


class WantedChunks:
    """Remembers the chunks told of last. O(1) per chunk. ``clock`` returns seconds. ``has_news``:
    whether there is something to take.

    Chunks that live in Redis for ``ttl_seconds`` are told of several times in their lives.
    """

    def __init__(
        self, index: ChunkIndex, clock: Callable[[], float], ttl_seconds: float | None = None
    ) -> None:
        self._index = index
        self._clock = clock
        self._interval_seconds = INTERVAL_SECONDS
        if ttl_seconds is not None:
            self._interval_seconds = min(INTERVAL_SECONDS, ttl_seconds / 3)
        self._told_at: Latest[bytes, float] = Latest(_MAX_TRACKED)
        self._news: list[bytes] = []
        self.has_news = False

    def sight(self, keys: Sequence[bytes]) -> None:
        """A request has this prompt."""
        now = self._clock()
        for key, is_held in zip(keys, self._index.has_each(keys), strict=True):
            if len(self._news) >= _MAX_PER_STEP:
                return
            if is_held and now - self._told_at.get(key, float("-inf")) >= self._interval_seconds:
                self._told_at[key] = now
                self._news.append(key)
                self.has_news = True

    def take(self) -> tuple[bytes, ...]:
        """What there is to tell the workers, at most 256 chunks."""
        news, self._news = tuple(self._news), []
        self.has_news = False
        return news
