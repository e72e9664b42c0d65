"""Which of the waiting loads is next, compared with a search through all of them."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.worker.job_queue import (
    _FENCE_LOOK_SECONDS,
    BY_TURN,
    QueuedJob,
    WaitingJobs,
)
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
        self.loads = WaitingJobs(self.open, self.fetching)
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
        queued = QueuedJob(job, fences[0] if fences else None, self.now)
        self.waiting.append(queued)
        insort(self.loads, queued, key=BY_TURN)

    def begin(self, _: int = 0) -> None:
        """The next load, and no other than a look at all of them finds."""
        ready = [queued for queued in self.waiting if self._is_ready(queued)]
        wanted = min(ready, key=lambda each: (each.turn, each.job.job_id), default=None)
        found, seconds = self.loads.next(self.now)
        assert found is wanted
        is_behind_passes = any(not queued.is_passed for queued in self.loads)
        assert found or seconds == (_FENCE_LOOK_SECONDS if is_behind_passes else math.inf)
        if wanted is not None:
            self.waiting.remove(wanted)
            self.running.append(wanted)
            self.fetching.update(wanted.job.keys)

    def end(self, index: int) -> None:
        if self.running:
            queued = self.running.pop(index % len(self.running))
            self.fetching.difference_update(queued.job.keys)
            self.open.discard(queued.job.job_id)

    def end_store(self, job_id: int) -> None:
        self.open.discard(job_id)

    def cancel(self, index: int) -> None:
        if self.waiting:
            queued = self.waiting.pop(index % len(self.waiting))
            self.loads.remove(queued)
            self.open.discard(queued.job.job_id)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def reach_fences(self, count: int) -> None:
        for fence in self.fences[:count]:
            fence.is_reached = True
        del self.fences[:count]

    def _is_ready(self, queued: QueuedJob) -> bool:
        has_passed = queued.fence is None or queued.fence.query()
        is_free = self.fetching.isdisjoint(queued.job.keys)
        return has_passed and is_free and getattr(queued.job, "after_job", None) not in self.open


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
    """A lane that is never free for long: a load's turn comes 10 ms later for each chunk."""
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


def test_of_loads_that_came_at_the_same_time_the_first_to_be_planned_begins_first() -> None:
    """A coarse clock gives both the same time; the second waits for a later forward pass."""
    lanes = Lanes()
    for key in (1, 2):
        lanes.submit([key], 0, 1, 9.0)
        lanes.now -= 0.001
    lanes.reach_fences(1)
    lanes.begin()
    assert not lanes.waiting[0].is_passed
    assert len(lanes.waiting) == 1
