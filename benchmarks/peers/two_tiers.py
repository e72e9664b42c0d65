"""A paged cache with a CPU tier behind it, and the time of stores: at compute, or at eviction.

Both tiers are LRU. Blocks are stored when they are computed, as the product does, or *late*, when
the paged cache evicts them. A hit stays in its tier. A late store has to end before the next
forward pass overwrites the block, so the engine's step waits for all evictions of a prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.peers.cache_policies import Requests


@dataclass(frozen=True)
class Stored:
    """In blocks. ``found``: each prompt's leading blocks in either tier. ``most_at_once``: the most
    stores for one prompt."""

    found: tuple[int, ...]
    computed: int
    stored: int
    most_at_once: int


def replay(requests: Requests, paged_blocks: int, tier_blocks: int, *, late: bool) -> Stored:
    """A whole trace, from empty tiers."""
    paged, tier = _Lru(paged_blocks), _Lru(tier_blocks)
    found, stores = [], []
    for _, blocks in requests:
        leading = _num_leading(blocks, paged, tier)
        lost = paged.use(blocks)
        wanted = lost if late else blocks[leading:]
        stores.append(sum(block not in tier for block in wanted))
        tier.use([block for block in blocks if block in tier])
        tier.use(wanted)
        found.append(leading)
    computed = sum(len(blocks) for _, blocks in requests) - sum(found)
    return Stored(tuple(found), computed, sum(stores), max(stores))


class _Lru:
    """Least recently used; of blocks used together the last one is evicted first."""

    def __init__(self, capacity: int) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def use(self, blocks: Sequence[int]) -> list[int]:
        """Returns the evicted blocks, in their prompt's order."""
        for block in reversed(blocks):
            self._held[block] = None
            self._held.move_to_end(block)
        too_many = max(0, len(self._held) - self._capacity)
        return [self._held.popitem(last=False)[0] for _ in range(too_many)][::-1]


def _num_leading(blocks: Iterable[int], *tiers: _Lru) -> int:
    number = 0
    for block in blocks:
        if not any(block in tier for tier in tiers):
            break
        number += 1
    return number
