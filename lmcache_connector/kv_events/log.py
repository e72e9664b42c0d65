"""What routers are told: which blocks entered and left which tier of this instance.

Blocks are named as vLLM names them in its own events, so that a block of GPU memory and the same
block in a lower tier have one name. A chunk is in a tier once all ranks that store it have put it
there. Chunks that Redis drops by itself are told as removed when they are looked for and missing.
So is a chunk of Redis when its lifetime is over, and when ``MAX_REDIS_CHUNKS`` others have been
written or used since: it may still be there, and a router's credit is all that is lost.

Runs on the scheduler's thread. Keeps a description, some 12 bytes a token, of every chunk that is
in a tier, or that an open job may bring there.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_connector.plans import RankReport, Tier

MAX_REDIS_CHUNKS = 1 << 16
MAX_LEFT_BEHIND = 512
"""Of how many chunks that a reset, or their lifetime, has ended is told at once."""


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
    jobs: set[int] = field(default_factory=set)  # open ones that may bring it

    @property
    def is_over(self) -> bool:
        return not (self.jobs or any(self.holders.values()))


class KvEventLog:
    """Turns the ranks' reports into events. ``world_size``: how many ranks make a whole chunk.
    ``ttl_seconds``: the lifetime of what is in Redis; ``refresh_ttl``: each load renews it.
    ``is_wanted``: somebody takes the events. ``clock`` returns seconds.

    Chunks nobody has described, such as those of the self-test, are passed over; without
    ``is_wanted`` that is all of them.
    """

    def __init__(
        self,
        world_size: int,
        ttl_seconds: float | None = None,
        *,
        refresh_ttl: bool = False,
        is_wanted: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_ranks = world_size
        self.needed: Callable[[bytes], int] = lambda key: (1 << world_size) - 1
        """Which ranks have to put a chunk in a tier, as a bit set: see :class:`ChunkIndex`."""
        self._ttl_seconds = math.inf if ttl_seconds is None else ttl_seconds
        self._uses_count = ttl_seconds is None or refresh_ttl
        self._is_wanted = is_wanted
        self._clock = clock
        self._chunks: dict[bytes, _Chunk] = {}
        # What is in Redis, in the order in which it was written or used, and when that was.
        self._in_redis: OrderedDict[bytes, float] = OrderedDict()
        # Events that nobody was told of yet, and all chunks that a reset has ended.
        self._news: deque[KvEvent | dict[bytes, _Chunk]] = deque()

    def __len__(self) -> int:
        """Chunks described."""
        return len(self._chunks)

    def describe(
        self, keys: Sequence[bytes], job_id: int, describe: Callable[[int], BlockRun]
    ) -> None:
        """Before a job that may bring these chunks to a tier; ``describe(i)`` describes the i-th,
        and is called if it is new."""
        if not self._is_wanted:
            return
        for i, key in enumerate(keys):
            if key not in self._chunks:
                self._chunks[key] = _Chunk(describe(i))
            elif key in self._in_redis and self._uses_count:
                self._renew(key)
            self._chunks[key].jobs.add(job_id)

    def apply(self, report: RankReport) -> None:
        """Learn what one rank's tiers took in and let go."""
        if not self._chunks:
            return
        over = self._clock() - self._ttl_seconds
        for _ in range(min(MAX_LEFT_BEHIND, len(self._in_redis))):
            key, at = next(iter(self._in_redis.items()))
            if at > over:
                break
            self.missing(key)
        # A chunk may leave memory once it is written: it must be known still.
        for key in report.written:
            self._hold(Tier.REDIS, report.rank, key)
        for event in report.events:
            if event.admitted:
                self._hold(Tier.CPU, report.rank, event.key)
            else:
                self.gone(Tier.CPU, report.rank, event.key)

    def gone(self, tier: Tier, rank: int, key: bytes) -> None:
        """Learn that this rank's part of a chunk has left the tier."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        before, needed = chunk.holders.get(tier, 0), self.needed(key)
        chunk.holders[tier] = after = before & ~(1 << rank & (needed | before) or needed)
        if tier is Tier.REDIS and not after:
            self._in_redis.pop(key, None)
        if before & needed == needed != after & needed:
            self._news.append(_removed(tier, chunk))
        if chunk.is_over:
            del self._chunks[key]

    def missing(self, key: bytes) -> None:
        """Learn that Redis was asked for a chunk and does not have it."""
        for rank in range(self._num_ranks):
            self.gone(Tier.REDIS, rank, key)

    def settle(self, keys: Iterable[bytes], job_id: int) -> None:
        """A job has ended: forget what it brought nowhere, unless another may bring it."""
        for key in keys:
            if (chunk := self._chunks.get(key)) is not None:
                chunk.jobs.discard(job_id)
                if chunk.is_over:
                    del self._chunks[key]

    def forget_jobs(self) -> None:
        """No job is open any more."""
        for chunk in self._chunks.values():
            chunk.jobs.clear()
        self._chunks = {key: chunk for key, chunk in self._chunks.items() if not chunk.is_over}

    def clear(self) -> None:
        """Nothing stored before can be hit any more."""
        if self._chunks:
            self._news.append(self._chunks)
        self._chunks, self._in_redis = {}, OrderedDict()

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` would return something."""
        return bool(self._news)

    def take(self) -> list[KvEvent]:
        """Events since the last call, in order. Those of a reset come bit by bit, and what follows
        them waits."""
        events: list[KvEvent] = []
        num_left = MAX_LEFT_BEHIND
        while self._news:
            ended = self._news[0]
            if not isinstance(ended, dict):
                events.append(ended)
            elif num_left and ended:
                key, chunk = ended.popitem()
                needed = self.needed(key)
                tiers = [t for t, held in chunk.holders.items() if held & needed == needed]
                events += [_removed(tier, chunk) for tier in tiers]
                num_left -= 1
                continue
            elif ended:
                break
            self._news.popleft()
        return events

    def _renew(self, key: bytes) -> None:
        self._in_redis[key] = self._clock()
        self._in_redis.move_to_end(key)

    def _hold(self, tier: Tier, rank: int, key: bytes) -> None:
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        before, needed = chunk.holders.get(tier, 0), self.needed(key)
        chunk.holders[tier] = after = before | 1 << rank
        if before & needed != needed == after & needed:
            self._news.append(BlocksStored(tier, chunk.blocks))
        if tier is Tier.REDIS:
            self._renew(key)
            if len(self._in_redis) > MAX_REDIS_CHUNKS:
                self.missing(next(iter(self._in_redis)))


def _removed(tier: Tier, chunk: _Chunk) -> BlocksRemoved:
    return BlocksRemoved(tier, chunk.blocks.hashes, chunk.blocks.shared)
