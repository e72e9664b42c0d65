"""Which chunks the CPU tiers of all ranks hold, as far as the scheduler knows.

A chunk is *there* when every rank has it, and *planned* while store jobs for it run. Both count as
hits: workers run jobs in order, so a load planned after a store finds what it stored. What the
index says may be late; a load that finds a chunk gone fails and is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_connector.plans import CacheEvent


class ChunkIndex:
    """``world_size``: how many ranks must hold a chunk for it to be there."""

    def __init__(self, world_size: int) -> None:
        self._all_ranks = (1 << world_size) - 1
        self._holders: dict[bytes, int] = {}  # key -> bit set of the ranks that hold it
        self._planned: dict[bytes, int] = {}  # key -> the latest store job for it

    def __len__(self) -> int:
        """Chunks that at least one rank holds."""
        return len(self._holders)

    def __contains__(self, key: bytes) -> bool:
        return self.has_each((key,))[0]

    def has_each(self, keys: Iterable[bytes]) -> list[bool]:
        """``key in self`` for each key, in one pass: long prompts have hundreds."""
        holders, planned, all_ranks = self._holders, self._planned, self._all_ranks
        return [holders.get(key) == all_ranks or key in planned for key in keys]

    def planned_job(self, key: bytes) -> int:
        """The store job a load of this chunk must wait for, 0 if it is already there."""
        if self._holders.get(key) == self._all_ranks:
            return 0
        return self._planned.get(key, 0)

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
        """No store job is under way any more."""
        self._planned.clear()

    def apply(self, rank: int, events: Iterable[CacheEvent]) -> None:
        """Learn what entered and left a rank's CPU tier, in order."""
        bit = 1 << rank
        for event in events:
            if event.admitted:
                self._holders[event.key] = self._holders.get(event.key, 0) | bit
                continue
            self.drop(rank, event.key)

    def drop(self, rank: int, key: bytes) -> None:
        """Learn that this rank does not hold the chunk."""
        holders = self._holders.get(key, 0) & ~(1 << rank)
        if holders:
            self._holders[key] = holders
        else:
            self._holders.pop(key, None)

    @property
    def num_planned(self) -> int:
        return len(self._planned)
