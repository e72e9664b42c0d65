"""What routers are told: which blocks entered and left which tier of this instance.

Blocks are named as vLLM names them in its own events, so that a block of GPU memory and the same
block in a lower tier have one name. A chunk is in a tier when every rank has put it there. What
Redis drops by itself is learned only when it is looked for and missing.

Runs on the scheduler's thread. Keeps a description, about 4 bytes a token, of every chunk that is
in a tier, or on its way there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_connector.plans import RankReport, Tier


@dataclass(frozen=True, slots=True)
class BlockRun:
    """The consecutive blocks of one chunk, ``block_size`` tokens each.

    ``parent_hash`` names the block before them, if any. ``extra_keys``: what vLLM adds to the hash
    of each block beside its tokens. ``shared``: other instances can load it from Redis as well.
    """

    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: array[int]
    block_size: int
    lora: tuple[int, str] | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    shared: bool = True


@dataclass(frozen=True, slots=True)
class BlocksStored:
    tier: Tier
    blocks: BlockRun


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """``shared``: as it was stored."""

    tier: Tier
    hashes: tuple[bytes, ...]
    shared: bool = True


KvEvent = BlocksStored | BlocksRemoved


@dataclass(slots=True)
class _Chunk:
    blocks: BlockRun
    holders: dict[Tier, int] = field(default_factory=dict)  # bit sets of ranks

    @property
    def is_nowhere(self) -> bool:
        return not any(self.holders.values())


class KvEventSink:
    """Takes what becomes of chunks and forgets it: for an engine whose events nobody wants.

    ``events``: those since the last :meth:`take`, in order.
    """

    events: list[KvEvent]

    def __init__(self) -> None:
        self.events = []

    def describe(self, keys: Sequence[bytes], describe: Callable[[int], BlockRun]) -> None:
        """Before a job that may bring these chunks to a tier; ``describe(i)`` describes the i-th,
        and is called if it is new."""

    def apply(self, report: RankReport) -> None:
        """Learn what one rank's tiers took in and let go."""

    def gone(self, tier: Tier, rank: int, key: bytes) -> None:
        """Learn that this rank's part of a chunk has left the tier."""

    def missing(self, key: bytes) -> None:
        """Learn that Redis was asked for a chunk and does not have it."""

    def settle(self, keys: Iterable[bytes]) -> None:
        """Forget what a job that has ended brought nowhere."""

    def clear(self) -> None:
        """Nothing stored before can be hit any more."""

    def take(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        events, self.events = self.events, []
        return events


class KvEventLog(KvEventSink):
    """Turns the ranks' reports into events. ``world_size``: how many ranks make a whole chunk.

    Chunks nobody has described, such as those of the self-test, are passed over.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._all_ranks = (1 << world_size) - 1
        self._chunks: dict[bytes, _Chunk] = {}

    def __len__(self) -> int:
        """Chunks described."""
        return len(self._chunks)

    def describe(self, keys: Sequence[bytes], describe: Callable[[int], BlockRun]) -> None:
        for i, key in enumerate(keys):
            if key not in self._chunks:
                self._chunks[key] = _Chunk(describe(i))

    def apply(self, report: RankReport) -> None:
        # A chunk may leave memory once it is written: it must be known still.
        for key in report.written:
            self._hold(Tier.REDIS, report.rank, key)
        for event in report.events:
            if event.admitted:
                self._hold(Tier.CPU, report.rank, event.key)
            else:
                self.gone(Tier.CPU, report.rank, event.key)

    def gone(self, tier: Tier, rank: int, key: bytes) -> None:
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        before = chunk.holders.get(tier, 0)
        chunk.holders[tier] = before & ~(1 << rank)
        if before == self._all_ranks:
            self.events.append(_removed(tier, chunk))
        if chunk.is_nowhere:
            del self._chunks[key]

    def missing(self, key: bytes) -> None:
        for rank in range(self._all_ranks.bit_length()):
            self.gone(Tier.REDIS, rank, key)

    def settle(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.is_nowhere:
                del self._chunks[key]

    def clear(self) -> None:
        for chunk in self._chunks.values():
            for tier, holders in chunk.holders.items():
                if holders == self._all_ranks:
                    self.events.append(_removed(tier, chunk))
        self._chunks.clear()

    def _hold(self, tier: Tier, rank: int, key: bytes) -> None:
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        before = chunk.holders.get(tier, 0)
        chunk.holders[tier] = after = before | 1 << rank
        if before != after == self._all_ranks:
            self.events.append(BlocksStored(tier, chunk.blocks))


def _removed(tier: Tier, chunk: _Chunk) -> BlocksRemoved:
    return BlocksRemoved(tier, chunk.blocks.hashes, chunk.blocks.shared)
