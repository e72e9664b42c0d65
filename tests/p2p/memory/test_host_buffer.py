"""Memory is bounded, never handed out twice, and all of it comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_connector.p2p.memory.host_buffer import FreeList, HostBuffer, Region

PAGE = 4096


class HostBufferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.host_buffer = HostBuffer(16 * PAGE, 6 * PAGE, pinned=False)
        self.regions: list[tuple[Region, int]] = []
        self.count = 0

    @rule(size=st.integers(1, 8 * PAGE))
    def take(self, size: int) -> None:
        has_room = self.host_buffer.has_room(size)
        region = self.host_buffer.take(size)
        assert has_room == (region is not None)
        if region is None:
            assert self.host_buffer.used_bytes + size > 6 * PAGE  # at least the overflow would fit
            return
        self.count = self.count % 255 + 1
        assert len(region.view) == size
        region.view[:] = bytes([self.count]) * size
        self.regions.append((region, self.count))

    @rule(place=st.integers(0, 100))
    def give(self, place: int) -> None:
        if self.regions:
            region, _ = self.regions.pop(place % len(self.regions))
            self.host_buffer.give(region)

    @invariant()
    def nobody_writes_into_anothers_memory(self) -> None:
        for region, mark in self.regions:
            assert bytes(region.view) == bytes([mark]) * region.num_bytes

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.host_buffer.used_bytes <= self.host_buffer.capacity_bytes == 22 * PAGE
        assert (self.host_buffer.used_bytes == 0) == (not self.regions)


HostBufferMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestHostBuffer = HostBufferMachine.TestCase


def test_all_of_it_can_be_taken_again() -> None:
    host_buffer = HostBuffer(4 * PAGE, 0, pinned=False)
    regions = [host_buffer.take(PAGE) for _ in range(4)]
    assert host_buffer.take(1) is None
    for region in (regions[2], regions[0], regions[3], regions[1]):
        assert region is not None
        host_buffer.give(region)
    whole = host_buffer.take(4 * PAGE)
    assert whole is not None


def test_so_can_the_overflow() -> None:
    host_buffer = HostBuffer(PAGE, PAGE, pinned=False)
    kept = host_buffer.take(PAGE)
    for _ in range(3):
        region = host_buffer.take(PAGE)
        assert region is not None
        assert host_buffer.take(1) is None
        host_buffer.give(region)
    assert kept is not None


def test_nothing_is_given_back_twice() -> None:
    free = FreeList(10)
    start = free.take(4)
    assert start == 0
    free.give(0, 4)
    for again in ((0, 4), (2, 1), (9, 1)):
        with pytest.raises(ValueError, match="twice"):
            free.give(*again)
    assert free.num_free == 10


def test_a_region_of_nothing_is_a_bug() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        HostBuffer(PAGE, 0, pinned=False).take(0)
