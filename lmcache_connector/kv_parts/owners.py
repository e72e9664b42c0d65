"""Which rank stores KV that several ranks of an engine hold alike: latents, and KV heads if there
are fewer heads than ranks.

Among the ranks that hold the same share of a part, each owns some chunks, chosen by key. The owner
stores its chunks and writes them to Redis; the others read them from its memory. A rank that cannot
read them stores them too, and reports that at start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from lmcache_connector.kv_parts.part import part_of, turn

Alike = tuple[tuple[int, ...], ...]
"""All ranks of an engine, in groups of equal size that hold the same KV."""


@dataclass(frozen=True)
class Owners:
    """``alike``: per part of the model."""

    alike: tuple[Alike, ...]

    @property
    def numbers(self) -> list[int]:
        """Per part, the number of ranks that hold the same KV."""
        return [len(groups[0]) for groups in self.alike]

    def needed(self, reads: Sequence[Collection[int]]) -> Callable[[bytes], int]:
        """A function from a key to the bit set of ranks that must hold its chunk: the owners, and
        ranks that cannot read from them. ``reads``: per rank, the ranks whose memory it reads."""
        tables = [
            [sum(1 << rank for rank in _holders(groups, i, reads)) for i in range(len(groups[0]))]
            for groups in self.alike
        ]

        def needed(key: bytes) -> int:
            table = tables[part_of(key, len(tables))]
            return table[turn(key, len(table))]

        return needed


def _holders(groups: Alike, place: int, reads: Sequence[Collection[int]]) -> set[int]:
    """The ranks that must hold chunks whose owner is at index ``place`` of each group."""
    return {rank for g in groups for rank in g if rank == g[place] or g[place] not in reads[rank]}


@dataclass(eq=False)
class Share:
    """What one rank stores of the KV that it holds: everything if ``owners`` is ``None``.
    ``reads``: ranks whose memory this rank reads, except while ``is_away(rank)``."""

    rank: int
    owners: Owners | None = None
    reads: Collection[int] = field(default_factory=frozenset)
    is_away: Callable[[int], bool] = lambda rank: False

    def __post_init__(self) -> None:
        alike = self.owners.alike if self.owners is not None else (((self.rank,),),)
        self._own = [next(group for group in groups if self.rank in group) for groups in alike]

    @property
    def others(self) -> frozenset[int]:
        """Other ranks that hold some KV in common with this rank."""
        return frozenset(rank for group in self._own for rank in group) - {self.rank}

    def holders(self, key: bytes) -> Sequence[int]:
        """All ranks with the same KV under ``key``, this rank included."""
        return self._own[part_of(key, len(self._own))]

    def owner(self, key: bytes) -> int:
        holders = self.holders(key)
        return holders[turn(key, len(holders))]

    def is_owner(self, key: bytes) -> bool:
        return self.owner(key) == self.rank

    def is_read_from_owner(self, key: bytes) -> bool:
        """Whether this rank reads the chunk from its owner instead of storing it."""
        return bool(self.reads) and (o := self.owner(key)) in self.reads and not self.is_away(o)
