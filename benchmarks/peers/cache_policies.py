"""Policies for replays of a block trace: the product's own, Belady's optimum, and others'.

A policy gets each prompt in turn. It returns how many leading blocks it still had, then admits all
of the prompt's blocks, and evicts others down to its capacity.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from lmcache_connector.plans import Claim
from lmcache_connector.retention.ledger import Ledger, Limits

Requests = Sequence[tuple[float, Sequence[int]]]


class Policy(Protocol):
    def serve(self, at: float, blocks: Sequence[int]) -> int:
        """Serve a prompt that comes ``at`` so many seconds. Returns its leading blocks in cache."""


class Ours:
    """The eviction policy of the product's CPU tier, for one tenant without hints."""

    def __init__(self, capacity: int, requests: Requests) -> None:
        from lmcache_connector.worker.lmcache_tier import ChunkTable

        self._now = 0.0
        self._ledger = Ledger(Limits.of(capacity, 0.5, 0.25), lambda: self._now)
        self._table: Any = ChunkTable(self._ledger, _engine_key, lambda key: None)
        self._capacity = capacity

    def serve(self, at: float, blocks: Sequence[int]) -> int:
        self._now = at
        keys = [block.to_bytes(32, "big") for block in blocks]
        found = _num_leading([_engine_key(key) in self._table for key in keys])
        self._ledger.use(keys[:found], _CLAIM)  # as a load does, or a prompt's first plan
        for key in keys[found:]:
            name = _engine_key(key)
            if name not in self._table:
                self._make_room()
                self._table[name] = _MEMORY
        self._ledger.use(keys, _CLAIM, [b"", *keys[:-1]])
        return found

    def _make_room(self) -> None:
        while len(self._table) >= self._capacity:
            for victim in self._table.get_evict_candidates(self._table):
                self._table.pop(victim)


class _EngineKey(int):
    """The part of LMCache's key that the policy reads, without the key's cost."""

    @property
    def chunk_hash(self) -> int:
        return int(self)


def _engine_key(key: bytes) -> Any:
    return _EngineKey(int.from_bytes(key, "big"))


_MEMORY: Any = SimpleNamespace(can_evict=True, get_physical_size=lambda: 1)
_CLAIM = Claim()


class Lru:
    """Evicts the least recently used blocks; of one prompt, the last blocks first."""

    def __init__(self, capacity: int, requests: Requests) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def serve(self, at: float, blocks: Sequence[int]) -> int:
        found = _num_leading([block in self._held for block in blocks])
        for block in reversed(blocks):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)
        return found


class Belady:
    """Knows the next use of each block, and evicts the one whose next use is furthest away."""

    def __init__(self, capacity: int, requests: Requests) -> None:
        self._capacity = capacity
        self._held: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], int]] = []
        self._next_uses = iter(_next_uses(requests))

    def serve(self, at: float, blocks: Sequence[int]) -> int:
        found = _num_leading([block in self._held for block in blocks])
        next_use = next(self._next_uses)
        for place, (block, then) in enumerate(zip(blocks, next_use, strict=True)):
            self._held[block] = worth = (-then, -place)
            heapq.heappush(self._heap, (worth, block))
        while len(self._held) > self._capacity:
            worth, block = heapq.heappop(self._heap)
            if self._held.get(block) == worth:
                del self._held[block]
        return found


class Peer:
    """One of libcachesim's policies. It gets a prompt's last blocks first, as LRU does."""

    def __init__(self, kind: type, capacity: int) -> None:
        import libcachesim

        self._cache = kind(capacity)
        self._request = libcachesim.Request(obj_id=0, obj_size=1)

    def serve(self, at: float, blocks: Sequence[int]) -> int:
        found = _num_leading([self._holds(block) for block in blocks])
        for block in reversed(blocks):
            self._request.obj_id = block
            self._cache.get(self._request)
        return found

    def _holds(self, block: int) -> bool:
        self._request.obj_id = block
        return self._cache.find(self._request, False) is not None


class ByTurns:
    """Evicts prompts that are least likely to be used soon, judging by earlier conversations.

    A prompt that continues an earlier one is the conversation's next turn. For each number of turns
    the policy learns whether and after how many seconds the next turn comes, and ranks prompts by
    the Gittins index of that: the best odds per second of waiting. It evicts the last block of the
    lowest prompt.
    """

    _TURNS, _AGES, _HORIZON_SECONDS = 5, 40, 3000.0

    def __init__(self, capacity: int, requests: Requests) -> None:
        self._capacity = capacity
        self._owner: dict[int, list[Any]] = {}  # block -> the prompt that used it last
        self._queues: list[OrderedDict[int, list[Any]]] = [OrderedDict() for _ in self._classes()]
        self._ends: OrderedDict[int, tuple[float, int]] = OrderedDict()  # last block -> prompt
        self._continued = [[0.0] * self._AGES for _ in self._classes()]
        self._ended = [[0.0] * self._AGES for _ in self._classes()]
        self._index = [[1.0] * self._AGES for _ in self._classes()]
        self._num_served = 0

    def serve(self, at: float, blocks: Sequence[int]) -> int:
        found = _num_leading([block in self._owner for block in blocks])
        kind = self._learn(at, blocks)
        prompt = [at, kind, list(blocks)]
        for block in blocks:
            self._owner[block] = prompt
        self._num_served += 1
        self._queues[kind][self._num_served] = prompt
        while len(self._owner) > self._capacity:
            self._let_go(at)
        return found

    def _classes(self) -> range:
        return range(self._TURNS)

    def _learn(self, at: float, blocks: Sequence[int]) -> int:
        """Learn from the prompt. Returns the turns before it, ``_TURNS - 1`` at most."""
        turn = 0
        for block in reversed(blocks[1:]):
            if block in self._ends:
                then, turns = self._ends.pop(block)
                self._continued[turns][self._age(at - then)] += 1
                turn = min(turns + 1, self._TURNS - 1)
                break
        end = blocks[-2] if len(blocks) > 1 else blocks[-1]  # the last block may not be full
        self._ends[end] = (at, turn)
        self._ends.move_to_end(end)
        while self._ends:
            then, turns = next(iter(self._ends.values()))
            if at - then <= self._HORIZON_SECONDS:
                break
            self._ends.popitem(last=False)
            self._ended[turns][self._age(at - then)] += 1
        if self._num_served % 500 == 499:
            self._rank()
        return turn

    def _let_go(self, now: float) -> None:
        oldest: list[tuple[float, float, int, int]] = []
        for number, queue in enumerate(self._queues):
            while queue:
                serial, (at, turn, blocks) = next(iter(queue.items()))
                while blocks and self._owner.get(blocks[-1]) is not queue[serial]:
                    blocks.pop()
                if blocks:
                    oldest.append((self._index[turn][self._age(now - at)], at, number, serial))
                    break
                del queue[serial]
        _, _, number, serial = min(oldest)
        del self._owner[self._queues[number][serial][2].pop()]

    def _age(self, seconds: float) -> int:
        """Ages in steps of the square root of two."""
        return 0 if seconds < 1 else min(self._AGES - 1, int(math.log2(seconds) * 2) + 1)

    def _rank(self) -> None:
        edges = [0.0, *(2 ** (i / 2) for i in range(self._AGES))]
        for turn in self._classes():
            left, hazards = sum(self._continued[turn]) + sum(self._ended[turn]), []
            for continued, ended in zip(self._continued[turn], self._ended[turn], strict=True):
                hazards.append(continued / left if left > 1e-9 else 0.0)
                left -= continued + ended
            for age in range(self._AGES):
                alive, odds, seconds, best = 1.0, 0.0, 0.0, 0.0
                for later in range(age, self._AGES):
                    hazard = hazards[later]
                    seconds += alive * (edges[later + 1] - edges[later]) * (1 - hazard / 2)
                    odds += alive * hazard
                    alive *= 1 - hazard
                    best = max(best, odds / seconds)
                self._index[turn][age] = best
            self._continued[turn] = [0.98 * n for n in self._continued[turn]]
            self._ended[turn] = [0.98 * n for n in self._ended[turn]]


def libcachesim_peers() -> dict[str, type]:
    """Empty without libcachesim."""
    try:
        import libcachesim
    except ImportError:
        return {}
    return {"s3fifo": libcachesim.S3FIFO, "lfu": libcachesim.LFU, "peer_lru": libcachesim.LRU}


def _num_leading(are_held: Sequence[bool]) -> int:
    return are_held.index(False) if False in are_held else len(are_held)


def _next_uses(requests: Requests) -> list[list[float]]:
    """For each block of each prompt, the number of the next prompt that uses it."""
    wanted: dict[int, int] = {}
    uses: list[list[float]] = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number][1]
        uses.append([wanted.get(block, math.inf) for block in blocks])
        wanted.update(dict.fromkeys(blocks, number))
    return uses[::-1]
