"""Chunks that a plan loads inside its step exist when the plan arrives, whatever is evicted."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.plans import CacheEvent, Claim
from lmcache_connector.retention.leaving import LeavingChunks
from lmcache_connector.retention.ledger import Ledger, Limits
from tests.support.clock import wait_until

KEYS = [bytes([i]) * 32 for i in range(24)]
CAPACITY = 10  # chunks
LONG = 120.0  # seconds that no wait of these tests takes


class Counted:
    """The memory of a chunk in the tier."""

    references = 1

    def ref_count_up(self) -> None:
        self.references += 1

    def ref_count_down(self) -> None:
        self.references -= 1


class Rank:
    """A CPU tier: `Ledger` and `LeavingChunks` around a set of keys."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: dict[bytes, Counted] = {}
        self.gone: list[tuple[bytes, Counted]] = []
        self.changed: dict[bytes, None] = {}
        self.leaving = LeavingChunks(lambda keys: self.changed.update(dict.fromkeys(keys)))
        self.ledger = Ledger(Limits(), lambda: 0.0, self.leaving)
        self.num_evicted = self.num_refused = 0

    def store(self, key: bytes) -> None:
        if key in self.held:
            return
        if len(self.held) == CAPACITY:
            victims = self.ledger.evict(1, lambda key: True)
            if not victims:
                self.num_refused += 1
                return
            self.num_evicted += 1
            self.forget(victims[0])
            assert victims[0] not in self.leaving.removed, "its memory is another's now"
        self.held[key] = Counted()
        self.ledger.admit(key, 1)
        self.changed[key] = None

    def forget(self, key: bytes) -> None:
        memory = self.held.pop(key)
        self.ledger.drop(key, memory)
        memory.ref_count_down()
        self.gone.append((key, memory))
        self.changed[key] = None

    def has_memory_of(self, key: bytes) -> bool:
        return key in self.held or key in self.leaving.removed

    def check_references(self) -> None:
        kept = self.leaving.removed
        assert all(memory.references == 1 for memory in self.held.values())
        assert all(memory.references == (kept.get(key) is memory) for key, memory in self.gone)

    def report(self) -> tuple[list[CacheEvent], int]:
        changed, self.changed = self.changed, {}
        leaving, number = self.leaving.report(changed)
        events = [CacheEvent(k, k in self.held, is_leaving=k in leaving) for k in changed]
        return events, number

    def report_all(self) -> None:
        self.changed.update(dict.fromkeys([*self.held, *self.leaving.removed]))


@dataclass
class Plan:
    loads: list[bytes]
    acked: tuple[int, ...]


@dataclass
class World:
    """``depth`` plans are under way at once: each is made without the reports of the others."""

    chance: random.Random
    depth: int
    ranks: list[Rank]
    index: ChunkIndex = field(init=False)
    plans: deque[Plan] = field(default_factory=deque)
    num_loads: int = 0
    num_unannounced: int = 0

    def __post_init__(self) -> None:
        self.index = ChunkIndex(len(self.ranks))

    def step(self) -> None:
        wanted = self.chance.sample(KEYS, 3)
        loads = [key for key in wanted if self.index.num_firm([key])]
        self.plans.append(Plan(loads, self.index.take_acked()))
        if len(self.plans) >= self.depth:
            plan = self.plans.popleft()
            for rank in self.ranks:
                self._execute(rank, plan)
            self.num_loads += len(plan.loads)
            self._tell()

    def _execute(self, rank: Rank, plan: Plan) -> None:
        assert all(map(rank.has_memory_of, plan.loads)), "a load inside a step found a chunk gone"
        if plan.acked:
            rank.leaving.note_acked(plan.acked[rank.number])
        for _ in range(self.chance.randrange(4)):  # other threads, beside the forward pass
            key = self.chance.choice(KEYS)
            act = self.chance.randrange(6)
            if act < 3:
                rank.store(key)
            elif act == 3 and key in rank.held:
                rank.ledger.use([key], Claim(), [b""])
            elif act == 4 and rank.held:
                rank.ledger.announce(min(len(rank.held), 3), lambda key: True)
            elif act == 5 and key in rank.held and self.chance.random() < 0.7:
                self.num_unannounced += 1
                rank.forget(key)
        rank.check_references()

    def _tell(self) -> None:
        reports = [(rank, rank.report()) for rank in self.ranks]
        fate = self.chance.random()
        for rank, report in reports:
            if fate < 0.05:
                continue  # a failed step: its reports are lost
            if fate < 0.1:
                rank.report_all()
                continue
            self.index.apply(rank.number, *report)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_loads_inside_steps_find_all_their_chunks(depth: int, world_size: int) -> None:
    num_loads = num_evicted = num_refused = num_unannounced = 0
    for seed in range(150):
        ranks = [Rank(number) for number in range(world_size)]
        world = World(random.Random(seed), depth, ranks)
        for _ in range(60):
            world.step()
        num_loads += world.num_loads
        num_unannounced += world.num_unannounced
        num_evicted += sum(rank.num_evicted for rank in ranks)
        num_refused += sum(rank.num_refused for rank in ranks)
    assert num_loads > 1000
    assert num_evicted > 1000
    assert num_refused > 300
    assert num_unannounced > 300


def test_an_announced_chunk_that_is_used_again_is_not_evicted() -> None:
    rank, index = Rank(0), ChunkIndex(1)
    for key in KEYS[:CAPACITY]:
        rank.store(key)
    index.apply(0, *rank.report())
    assert index.num_firm(KEYS) == CAPACITY
    rank.ledger.announce(2, lambda key: True)
    index.apply(0, *rank.report())
    first, second = KEYS[:2]
    assert not index.num_firm([first])
    assert not index.num_firm([second])
    assert first in index  # still a hit, for loads outside steps
    rank.ledger.use([first], Claim(), [b""])
    index.apply(0, *rank.report())
    assert index.num_firm([first])
    rank.leaving.note_acked(index.take_acked()[0])
    rank.store(KEYS[CAPACITY])
    assert second not in rank.held
    assert first in rank.held


@contextmanager
def waiting(leaving: LeavingChunks, acked: int) -> Iterator[list[bool]]:
    """A thread that waits for a plan, and what its wait returned once the block has ended it."""
    ends: list[bool] = []
    thread = threading.Thread(target=lambda: ends.append(leaving.wait(acked, LONG)), daemon=True)
    thread.start()
    wait_until(lambda: bool(leaving._plan_came._waiters), "a wait that begins")  # type: ignore[attr-defined]
    yield ends
    thread.join(LONG / 2)


def test_a_wait_for_a_plan_ends_with_it_or_between_steps() -> None:
    leaving = LeavingChunks(lambda keys: None)
    assert not leaving.wait(0)  # nothing was announced
    assert not leaving.announce(KEYS[:1])
    _, number = leaving.report(KEYS[:1])
    with waiting(leaving, 0) as ends:
        leaving.note_acked(number)
    assert ends == [True]
    assert leaving.announce(KEYS[:1])
    assert leaving.wait(0)  # the plan has arrived
    leaving.announce(KEYS[1:2])
    with waiting(leaving, number) as ends:
        leaving.await_plans(may_come=False)
    assert ends == [False]
    assert not leaving.wait(number, float("inf"))  # a wait raises OverflowError
