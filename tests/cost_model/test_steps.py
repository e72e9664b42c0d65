"""What a load costs in steps, and how long steps are found to be."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.cost_model.steps import StepTime, StoreBacklog


def begins_after(num_batches: int, step: int, load: int) -> int:
    """The course in the module's docstring, played. How much later than step 0, which is planned at
    0, the step begins that computes what the load left."""

    def ended(number: int) -> int:
        return (number + num_batches) * step

    def queued(number: int) -> int:
        return ended(number - num_batches)

    reported = next(i for i in count(1) if queued(i) >= load)
    computed = next(i for i in count(1) if queued(i) >= ended(reported))
    return ended(computed - 1) - ended(-1)


@given(st.sampled_from([1, 2, 3]), st.integers(1, 300), st.integers(0, 3000))
def test_a_load_costs_the_steps_until_it_is_heard_of(
    num_batches: int, step: int, load: int
) -> None:
    found = StepTime(num_batches).wait_seconds(load, step)
    assert found == begins_after(num_batches, step, load)


def test_beside_nothing_else_a_load_costs_its_time() -> None:
    steps = StepTime(2)
    assert steps.wait_seconds(0.5, None) == pytest.approx(0.501)


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_steps_are_measured_by_their_plans(num_batches: int) -> None:
    """Of decode steps of 10 ms among prefills of 300 ms: a plan shows the step that has ended."""
    steps, now = StepTime(num_batches), 0.0
    ends: list[float] = []
    for number in range(60):
        if number >= num_batches:
            now = ends[number - num_batches]
        has_prefill = number % 3 == 0
        steps.planned(now, follows=number > 0, has_prefill=has_prefill)
        ends.append((ends[-1] if ends else 0.0) + (0.3 if has_prefill else 0.01))
    assert steps.decode_seconds == pytest.approx(0.01, rel=1e-6)


def test_a_pause_between_requests_is_no_step() -> None:
    steps = StepTime(1)
    for start in (0.0, 100.0, 200.0):
        for number in range(3):
            steps.planned(start + 0.02 * number, follows=number > 0, has_prefill=False)
    assert steps.decode_seconds == pytest.approx(0.02)


def decode(steps: StepTime, start: float, seconds: float, count: int) -> float:
    """Steps that last so long; returns when the next one is planned."""
    for number in range(count):
        steps.planned(start + number * seconds, follows=True, has_prefill=False)
    return start + count * seconds


def test_one_long_step_says_little_of_the_next() -> None:
    """Whoever came while something was compiled for 30 s would wait for no load after it."""
    steps = StepTime(2)
    now = decode(steps, 0.0, 0.01, 20)
    now = decode(steps, now + 30.0, 0.01, 1)
    assert steps.decode_seconds < 0.03
    decode(steps, now, 0.01, 12)
    assert steps.decode_seconds == pytest.approx(0.01, rel=0.15)


def test_a_store_under_way_takes_what_the_last_ones_took() -> None:
    now = 0.0
    stores = StoreBacklog(lambda: now)
    for job_id in range(20):
        stores.planned(job_id)
        stores.ended(job_id, [0.1, 0.2])  # the slower rank counts
    stores.planned(20)
    assert stores.wait_seconds(20) == pytest.approx(0.2, rel=0.01)
    now = 0.15
    assert stores.wait_seconds(20) == pytest.approx(0.05, rel=0.05)
    assert stores.wait_seconds(19) == 0.0
    assert stores.wait_seconds(0) == 0.0  # what relies on no store


def test_one_long_pass_says_nothing_of_the_next_store() -> None:
    stores = StoreBacklog(lambda: 0.0)
    for job_id, seconds in enumerate([0.2, 30.0, 0.2, 40.0, 0.2]):
        stores.planned(job_id)
        stores.ended(job_id, [seconds])
        stores.planned(100 + job_id)
        assert stores.wait_seconds(100 + job_id) == pytest.approx(0.2)


def test_a_backlog_shows_before_it_ends() -> None:
    """The first of them is a second old: the last one waits for all of that at least."""
    now = 0.0
    stores = StoreBacklog(lambda: now)
    stores.planned(1)
    now = 1.0
    stores.planned(2)
    assert stores.wait_seconds(2) == pytest.approx(1.0)
    stores.ended(1, [])  # no rank had heard of it
    assert stores.wait_seconds(2) == 0.0
