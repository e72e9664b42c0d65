"""Which rank of an engine stores what several of them hold alike: latents, and KV heads of which
there are fewer than ranks.

Of the ranks that hold the same of a part each owns some chunks, by their keys: the owner stores
them, and writes them to Redis. The others read them out of its memory. A rank that cannot do that
stores them as well, and says so at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from lmcache_connector.kv_parts.part import part_of, turn

Alike = tuple[tuple[int, ...], ...]
"""All ranks of an engine, in groups of one size that hold the same."""


@dataclass(frozen=True)
class Owners:
    """``alike``: of each part of the model."""

    alike: tuple[Alike, ...]

    @property
    def numbers(self) -> list[int]:
        """Of each part, how many ranks hold the same."""
        return [len(groups[0]) for groups in self.alike]

    def needed(self, reads: Sequence[Collection[int]]) -> Callable[[bytes], int]:
        """Which ranks must hold what is under a key, as a bit set: its owners, and those that
        cannot read it there. ``reads``: whose memory each rank reads."""
        tables = [
            [sum(1 << rank for rank in _holders(groups, i, reads)) for i in range(len(groups[0]))]
            for groups in self.alike
        ]

        def needed(key: bytes) -> int:
            table = tables[part_of(key, len(tables))]
            return table[turn(key, len(table))]

        return needed


def _holders(groups: Alike, place: int, reads: Sequence[Collection[int]]) -> set[int]:
    """Of the chunks that the rank in this place of each group owns."""
    return {rank for g in groups for rank in g if rank == g[place] or g[place] not in reads[rank]}


@dataclass(eq=False)
class Share:
    """What one rank stores of all that it holds; without ``owners`` that is everything. ``reads``:
    the ranks whose memory it reads; of those, what ``is_away`` at the moment is left nothing."""

    rank: int
    owners: Owners | None = None
    reads: Collection[int] = field(default_factory=frozenset)
    is_away: Callable[[int], bool] = lambda rank: False

    def __post_init__(self) -> None:
        alike = self.owners.alike if self.owners is not None else (((self.rank,),),)
        self._own = [next(group for group in groups if self.rank in group) for groups in alike]

    @property
    def others(self) -> frozenset[int]:
        """Ranks that hold something just as this one does."""
        return frozenset(rank for group in self._own for rank in group) - {self.rank}

    def holders(self, key: bytes) -> Sequence[int]:
        """Those that hold the same of it as this rank, itself among them."""
        return self._own[part_of(key, len(self._own))]

    def owner(self, key: bytes) -> int:
        holders = self.holders(key)
        return holders[turn(key, len(holders))]

    def is_owner(self, key: bytes) -> bool:
        return self.owner(key) == self.rank

    def is_elsewhere(self, key: bytes) -> bool:
        """Whether it is not stored here, but read from its owner."""
        return bool(self.reads) and (o := self.owner(key)) in self.reads and not self.is_away(o)
