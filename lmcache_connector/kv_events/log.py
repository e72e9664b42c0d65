"""KV cache events for routers: which blocks entered or left which tier of this instance.

Blocks have the names of vLLM's own events, so a block has one name in GPU memory and in the tiers.
A chunk is in a tier once all ranks that store it have put it there. A chunk in Redis is reported as
removed when a lookup or load finds that Redis lacks it, when its lifetime ends, or after
``MAX_REDIS_CHUNKS`` others were written or used. In the last two cases it may still exist (another
instance may have renewed it); routers then only fail to count it.

Runs on the scheduler's thread. Keeps a description, about 12 bytes per token, of every chunk that
is in a tier, or that an open job may put there.
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
MAX_REMOVALS = 512
"""Chunks reported as removed per call at most, after a reset or the end of lifetimes."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """The consecutive blocks of one chunk, ``block_size`` tokens each.

    ``parent_hash``: name of the block before them, if any. ``extra_keys``: per block, vLLM's hash
    inputs beside the tokens. ``shared``: other instances can load the chunk from Redis as well.
    """

    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: array[int]
    block_size: int
    lora: tuple[int, str] | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    shared: bool = True


@dataclass(frozen=True, slots=True)
class KvEvent:
    """A chunk entered ``tier`` (``is_stored``), or left it."""

    tier: Tier
    blocks: BlockRun
    is_stored: bool


@dataclass(slots=True)
class _Chunk:
    blocks: BlockRun
    holders: dict[Tier, int] = field(default_factory=dict)  # bit sets of ranks
    jobs: set[int] = field(default_factory=set)  # open jobs that may store or load it

    @property
    def is_over(self) -> bool:
        return not (self.jobs or any(self.holders.values()))


class KvEventLog:
    """Turns the ranks' reports into events. ``world_size``: ranks per chunk. ``ttl_seconds``:
    lifetime in Redis; ``refresh_ttl``: loads renew it. ``is_wanted``: events will be
    taken; otherwise the scheduler describes no chunk. ``clock`` returns seconds.

    Ignores chunks without a description, such as the self-test's.
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
        """Bit set of the ranks that must put a chunk in a tier: see :class:`ChunkIndex`."""
        self._ttl_seconds = math.inf if ttl_seconds is None else ttl_seconds
        self._uses_renew = ttl_seconds is None or refresh_ttl
        self.is_wanted = is_wanted
        self._clock = clock
        self._chunks: dict[bytes, _Chunk] = {}
        # Chunks in Redis with the time of their last write or use, oldest first.
        self._in_redis: OrderedDict[bytes, float] = OrderedDict()
        # Events not yet taken, and chunks removed by a reset.
        self.untaken: deque[KvEvent | dict[bytes, _Chunk]] = deque()

    def describe(
        self, keys: Sequence[bytes], job_id: int, describe: Callable[[int], BlockRun]
    ) -> None:
        """Describe chunks before a job may put them in a tier. ``describe(i)`` is called for the
        i-th chunk if it is new."""
        for i, key in enumerate(keys):
            if key not in self._chunks:
                self._chunks[key] = _Chunk(describe(i))
            elif key in self._in_redis and self._uses_renew:
                self._renew(key)
            self._chunks[key].jobs.add(job_id)

    def apply(self, report: RankReport) -> None:
        """Process one rank's changes."""
        if not self._chunks:
            return
        over = self._clock() - self._ttl_seconds
        for _ in range(min(MAX_REMOVALS, len(self._in_redis))):
            key, at = next(iter(self._in_redis.items()))
            if at > over:
                break
            self.missing(key)
        # Writes first: a chunk that has also left memory must not be forgotten in between.
        for key in report.written:
            self._hold(Tier.REDIS, report.rank, key)
        for event in report.events:
            if event.admitted:
                self._hold(Tier.CPU, report.rank, event.key)
            else:
                self.gone(Tier.CPU, report.rank, event.key)

    def gone(self, tier: Tier, rank: int, key: bytes) -> None:
        """The rank's copy has left the tier; if it neither had nor needs one, the owner's."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        before, needed = chunk.holders.get(tier, 0), self.needed(key)
        chunk.holders[tier] = after = before & ~(1 << rank & (needed | before) or needed)
        if tier is Tier.REDIS and not after:
            self._in_redis.pop(key, None)
        if before & needed == needed != after & needed:
            self.untaken.append(KvEvent(tier, chunk.blocks, is_stored=False))
        if chunk.is_over:
            del self._chunks[key]

    def missing(self, key: bytes) -> None:
        """Redis does not have the chunk, as far as known."""
        for rank in range(self._num_ranks):
            self.gone(Tier.REDIS, rank, key)

    def settle(self, keys: Iterable[bytes], job_id: int) -> None:
        """A job has ended: forget chunks that are in no tier and that no other job may bring."""
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
        """Report all chunks as removed, since the keys of some or all have changed."""
        if self._chunks:
            self.untaken.append(self._chunks)
        self._chunks, self._in_redis = {}, OrderedDict()

    def take(self) -> list[KvEvent]:
        """Events since the last call, in order. Removals of a reset are spread over calls, and
        later events wait for them."""
        events: list[KvEvent] = []
        num_left = MAX_REMOVALS
        while self.untaken:
            ended = self.untaken[0]
            if not isinstance(ended, dict):
                events.append(ended)
            elif num_left and ended:
                key, chunk = ended.popitem()
                needed = self.needed(key)
                tiers = [t for t, held in chunk.holders.items() if held & needed == needed]
                events += [KvEvent(tier, chunk.blocks, is_stored=False) for tier in tiers]
                num_left -= 1
                continue
            elif ended:
                break
            self.untaken.popleft()
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
            self.untaken.append(KvEvent(tier, chunk.blocks, is_stored=True))
        if tier is Tier.REDIS:
            self._renew(key)
            if len(self._in_redis) > MAX_REDIS_CHUNKS:
                self.missing(next(iter(self._in_redis)))
