"""Which of the loads that wait is next, against a look at all of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.worker.waiting_jobs import QueuedJob, WaitingLoads
from tests.support.jobs import load_job


@dataclass
class Fence:
    is_reached: bool = False

    def query(self) -> bool:
        return self.is_reached

    def elapsed_time(self, end: object, /) -> float:
        raise AssertionError("nobody times a load's fence")


class Lanes:
    """Begins loads as many lanes would. Stores have the ids 1 to 3."""

    def __init__(self) -> None:
        self.open = {1, 2, 3}
        self.fetching: set[bytes] = set()
        self.loads = WaitingLoads(self.open, self.fetching)
        self.waiting: list[QueuedJob] = []
        self.running: list[QueuedJob] = []
        self.fences: list[Fence] = []
        self.now = 0.0
        self.last_id = 10

    def submit(self, keys: list[int], after_job: int, num_fences: int, seconds: float) -> None:
        names = tuple(b"%d" % key for key in keys)
        self.last_id += 1
        job_id = self.last_id
        job = load_job(
            job_id, "r", names, ((0,) * len(names),), deadline_seconds=seconds,
            may_fetch=True, after_job=after_job,
        )  # fmt: skip
        self.now += 0.001
        self.open.add(job_id)
        fences = [Fence() for _ in range(num_fences)]
        self.fences += fences
        fence, fenced_at = (fences[0], None) if fences else (None, self.now)
        queued = QueuedJob(job, fence, self.now, self.now, fenced_at)
        self.waiting.append(queued)
        self.loads.add(queued)

    def begin(self, _: int = 0) -> None:
        """The next load, and no other than a look at all of them finds."""
        ready = [queued for queued in self.waiting if self._is_ready(queued)]
        wanted = min(ready, key=lambda each: (each.turn, each.job.job_id), default=None)
        assert self.loads.next(self.now) is wanted
        if wanted is not None:
            self.waiting.remove(wanted)
            self.running.append(wanted)
            self.fetching.update(wanted.job.keys)

    def end(self, index: int) -> None:
        if self.running:
            queued = self.running.pop(index % len(self.running))
            self.fetching.difference_update(queued.job.keys)
            self.loads.fetch_ended(queued.job.keys)
            self._has_ended(queued.job.job_id)

    def end_store(self, job_id: int) -> None:
        self._has_ended(job_id)

    def cancel(self, index: int) -> None:
        if self.waiting:
            queued = self.waiting.pop(index % len(self.waiting))
            assert self.loads.remove(queued.job.job_id) is queued
            self._has_ended(queued.job.job_id)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        late = {q.job.job_id for q in self.waiting if self.now >= q.deadline}
        assert {queued.job.job_id for queued in self.loads.overdue(self.now)} == late
        self.waiting = [q for q in self.waiting if q.job.job_id not in late]
        for job_id in late:
            self._has_ended(job_id)

    def reach_fences(self, count: int) -> None:
        for fence in self.fences[:count]:
            fence.is_reached = True
        del self.fences[:count]

    def _is_ready(self, queued: QueuedJob) -> bool:
        has_passed = queued.fence is None or queued.fence.query()
        is_free = self.fetching.isdisjoint(queued.job.keys)
        return has_passed and is_free and getattr(queued.job, "after_job", None) not in self.open

    def _has_ended(self, job_id: int) -> None:
        self.open.discard(job_id)
        self.loads.job_ended(job_id)


_KEYS = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)
_ACTS = st.one_of(
    st.tuples(
        st.just("submit"), _KEYS, st.integers(0, 3), st.integers(0, 1), st.sampled_from([0.05, 9.0])
    ),
    st.tuples(
        st.sampled_from(["begin", "end", "cancel", "end_store", "reach_fences"]), st.integers(0, 3)
    ),
    st.tuples(st.just("pass_time"), st.sampled_from([0.0, 0.02, 1.0])),
)


@given(st.lists(_ACTS, max_size=60))
def test_the_next_load_is_the_one_that_a_look_at_all_finds(acts: list[tuple[Any, ...]]) -> None:
    lanes = Lanes()
    for name, *values in acts:
        getattr(lanes, name)(*values)
    assert len(lanes.loads) == len(lanes.waiting)
    lanes.reach_fences(len(lanes.fences))
    for job_id in (1, 2, 3):
        lanes.end_store(job_id)
    for _ in range(len(acts)):
        lanes.begin()
        lanes.end(0)
    assert not lanes.waiting, "forgotten"
    assert len(lanes.loads) == 0


def test_nobody_waits_behind_an_endless_stream_of_small_loads() -> None:
    """Two lanes that are never free for long: a load's turn comes 10 ms later for each chunk."""
    lanes, num_begun = Lanes(), 0
    lanes.submit(list(range(100, 150)), 0, 0, 9.0)
    large = lanes.waiting[0]
    while large in lanes.waiting:
        assert num_begun < 500, "it starves"
        lanes.submit([num_begun % 7 * 10], 0, 0, 9.0)
        lanes.now += 0.001
        lanes.begin()
        lanes.end(0)
        num_begun += 1
    assert num_begun > 200, "small ones pass it for half a second"


class CountedKey(bytes):
    """Counts how often a set or dictionary looks for it."""

    looks = 0

    def __hash__(self) -> int:
        CountedKey.looks += 1
        return super().__hash__()


def _num_looks(num_waiting: int, *, share: bool) -> int:
    """While ten loads end, and so many others wait. ``share``: all want the same chunks. Each load
    has been seen to wait before."""
    open_jobs, fetching, now = set[int](), set[bytes](), 1.0
    loads = WaitingLoads(open_jobs, fetching)
    running: list[QueuedJob] = []

    def begin() -> None:
        while len(running) < 2 and (queued := loads.next(now)) is not None:
            fetching.update(queued.job.keys)
            running.append(queued)

    for job_id in range(1, num_waiting + 13):
        name = "shared" if share else job_id
        keys = tuple(CountedKey(f"{name} {i}".encode()) for i in range(20))
        job = load_job(job_id, "r", keys, ((0,) * len(keys),), may_fetch=True)
        loads.add(QueuedJob(job, None, 0.0, 0.0, 0.0))
        begin()
    before = CountedKey.looks
    for _ in range(10):
        ended = running.pop(0)
        fetching.difference_update(ended.job.keys)
        loads.fetch_ended(ended.job.keys)
        begin()
    return CountedKey.looks - before


@pytest.mark.parametrize("share", [False, True])
def test_an_ended_load_costs_the_same_whatever_waits(share: bool) -> None:
    """It cost a look at the chunks of each load, under the lock that each step takes."""
    few, many = (_num_looks(number, share=share) for number in (10, 1000))
    assert 0 < many <= few


def test_nothing_is_left_of_jobs_that_end_before_a_lane_takes_any() -> None:
    """Prefetches give way to loads from Redis for as long as there are some."""
    lanes = Lanes()
    lanes.last_id = 1 << 40  # numbers that nobody else has
    ids = []
    for _ in range(1000):
        lanes.submit([1], 0, 0, 3600.0)
        ids.append(lanes.waiting[0].job.job_id)
        lanes.cancel(0)
    # `ids`, the loop's variable and the call's argument refer to each.
    assert sum(sys.getrefcount(job_id) > 3 for job_id in ids) < 200


def test_one_is_called_in_the_stead_of_a_load_that_cannot_begin() -> None:
    """It waits for a second chunk. The other would be called by nobody else."""
    lanes = Lanes()
    for keys in ([1], [2]):
        lanes.submit(keys, 0, 0, 9.0)
        lanes.begin()
    lanes.submit([1, 2], 0, 0, 9.0)
    lanes.now += 1.0
    lanes.submit([1], 0, 0, 9.0)
    lanes.begin()
    lanes.end(0)
    lanes.begin()
    assert [queued.job.keys for queued in lanes.running] == [(b"2",), (b"1",)]
