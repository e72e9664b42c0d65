"""Measured speeds: tiers by loads of several sizes, prefill, steps and stores."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.cost_model.fit import FadingFit
from lmcache_connector.cost_model.prefill import PrefillSpeed
from lmcache_connector.cost_model.steps import StepTime, StoreBacklog
from lmcache_connector.cost_model.tiers import TierSpeed

MIB = 1 << 20


def loads(tier: TierSpeed, sizes: list[int], latency: float, bytes_per_second: float) -> None:
    for size in sizes:
        tier.arrived(0.0, size, latency + size / bytes_per_second)


@given(
    latency=st.floats(0, 0.5),
    bytes_per_second=st.floats(1e6, 1e10),
    sizes=st.lists(st.integers(1, 200).map(lambda n: n * MIB), min_size=2, max_size=10),
)
def test_a_line_is_fitted(latency: float, bytes_per_second: float, sizes: list[int]) -> None:
    tier = TierSpeed()
    loads(tier, [*sizes, 1 * MIB, 64 * MIB], latency, bytes_per_second)
    for size in (1 * MIB, 64 * MIB):
        assert tier.seconds(size) == pytest.approx(latency + size / bytes_per_second, rel=1e-2)


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 34), st.floats(0, 100), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_no_history_makes_a_negative_or_missing_prediction(
    history: list[tuple[int, float, bool]],
) -> None:
    tier = TierSpeed()
    for now, (num_bytes, seconds, cut) in enumerate(history):
        (tier.cut_off if cut else tier.arrived)(float(now), num_bytes, seconds)
        assert tier.latency_seconds >= 0
        assert tier.seconds_per_byte >= 0
        assert tier.seconds(num_bytes) > 0
        assert 0 < tier.failure_rate < 1


def test_an_empty_load_stalls_the_tier_until_a_load_arrives() -> None:
    tier = TierSpeed()
    loads(tier, [MIB], 0.0, 1e8)
    tier.cut_off(1.0, 0, 0.5)
    assert tier.stalled
    tier.arrived(2.0, MIB, MIB / 1e8)
    assert not tier.stalled


def test_measurements_expire_after_a_quiet_minute_but_a_stall_does_not() -> None:
    tier = TierSpeed()
    tier.measured(0.0, [(MIB, 1e-3)])
    tier.arrived(10.0, MIB, 0.1)
    assert not tier.is_outdated(69.9)
    assert tier.is_outdated(70.0)
    tier.cut_off(70.0, 0, 1.0)
    assert not tier.is_outdated(500.0)


def test_measurements_of_a_slow_tier_expire_later_and_later() -> None:
    """The first may be a hiccup; a tier that stays slow is tried less and less often."""
    tier, now, pauses = TierSpeed(), 0.0, []
    for _ in range(6):
        tier.arrived(now, MIB, 0.5)
        asked = now
        while not tier.is_outdated(now):
            now += 0.5
        pauses.append(now - asked)
        tier.tried(now)
        assert not tier.is_outdated(now)
    assert pauses == [2.0, 8.0, 32.0, 60.0, 60.0, 60.0]
    tier.cut_off(now, 0, 1.0)
    assert not tier.is_outdated(now + 500.0)


@pytest.mark.parametrize("probe", [[], [(MIB, 0.01)], [(8 * MIB, 0.08), (MIB, 0.01)]])
def test_a_probe_lowers_the_failure_rate(probe: list[tuple[int, float]]) -> None:
    """The second probe counts like one load, whatever it read; a probe with nothing to read only
    ends the stall."""
    tier = TierSpeed()
    tier.cut_off(0.0, 0, 1.0)
    before = tier.failure_rate
    tier.measured(1.0, probe)
    assert not tier.stalled
    assert tier.known == bool(probe)
    assert tier.failure_rate == before  # the first one only ends the stall
    tier.measured(2.0, probe)
    once = TierSpeed()
    once.cut_off(0.0, 0, 1.0)
    once.arrived(1.0, MIB, 0.01)
    assert tier.failure_rate == (once.failure_rate if probe else before)


# -- prefill ---------------------------------------------------------------------------------------


A, B = 1e-4, 3e-9


def true_seconds(num_tokens: int, context: int) -> float:
    return num_tokens * (A + B * (context + num_tokens / 2))


def observed(*prefills: tuple[int, int]) -> PrefillSpeed:
    speed = PrefillSpeed()
    for num_tokens, context in prefills:
        speed.observe(0.0, num_tokens, context, true_seconds(num_tokens, context))
    return speed


def test_length_and_context_are_separated() -> None:
    speed = observed(*[(2048, context) for context in range(0, 32768, 4096)])
    for start, end in ((0, 8192), (0, 32768), (30000, 32768)):
        expected = true_seconds(end - start, start)
        assert speed.seconds(start, end) == pytest.approx(expected, rel=0.03)


def test_chunked_prefill_adds_up_to_the_whole() -> None:
    speed = observed((2048, 0), (2048, 2048), (2048, 4096), (2048, 16384))
    parts = sum(speed.seconds(start, start + 1000) for start in range(0, 8000, 1000))
    assert parts == pytest.approx(speed.seconds(0, 8000))


def test_a_slow_first_prefill_soon_counts_little() -> None:
    speed = PrefillSpeed()
    speed.observe(0.0, 4096, 0, 30.0)  # compilation
    speed.observe(1.0, 4096, 0, true_seconds(4096, 0))
    speed.observe(2.0, 4096, 0, true_seconds(4096, 0))
    assert speed.seconds(0, 4096) < 3 * true_seconds(4096, 0)


def test_a_lasting_slowdown_counts_and_one_outlier_does_not() -> None:
    speed = observed(*[(4096, 0)] * 8)
    normal = speed.seconds(0, 4096)
    speed.observe(0.0, 4096, 0, 100 * normal)
    assert speed.seconds(0, 4096) < 1.3 * normal
    for _ in range(60):
        speed.observe(0.0, 4096, 0, 4 * normal)
    assert speed.seconds(0, 4096) > 3 * normal


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1e4)), max_size=30
    )
)
def test_no_history_makes_compute_negative(history: list[tuple[int, int, float]]) -> None:
    speed = PrefillSpeed()
    for now, (num_tokens, context, seconds) in enumerate(history):
        speed.observe(float(now), num_tokens, context, seconds)
        assert speed.seconds(100, 5000) >= speed.seconds(200, 5000) >= 0


HUNDREDTHS = st.integers(0, 1000).map(lambda number: number / 100)


@given(
    rows=st.lists(st.tuples(*[HUNDREDTHS] * 3), min_size=2, max_size=20),
    other=st.tuples(HUNDREDTHS, HUNDREDTHS),
)
def test_no_other_coefficients_fit_better(
    rows: list[tuple[float, float, float]], other: tuple[float, float]
) -> None:
    fit = FadingFit(scale=(1.0, 1.0), ridge=(1e-6, 1e-6))
    for x, y, seconds in rows:
        fit.observe(x, y, seconds, keep=1.0)

    def loss(a: float, b: float) -> float:
        penalty = 1e-6 * sum(x * x + y * y for x, y, _ in rows) * (a * a + b * b)
        return sum((a * x + b * y - seconds) ** 2 for x, y, seconds in rows) + penalty

    assert min(fit.coefficients) >= 0
    assert loss(*fit.coefficients) <= loss(*other) * (1 + 1e-6) + 1e-6


# -- steps and stores ------------------------------------------------------------------------------


def begins_after(num_batches: int, step: int, load: int) -> int:
    """The schedule in the docstring of ``cost_model/steps.py``, simulated. Returns how much later
    than step 0, planned at 0, the step begins that computes the rest after the load."""

    def ended(number: int) -> int:
        return (number + num_batches) * step

    def queued(number: int) -> int:
        return ended(number - num_batches)

    reported = next(i for i in count(1) if queued(i) >= load)
    computed = next(i for i in count(1) if queued(i) >= ended(reported))
    return ended(computed - 1) - ended(-1)


@given(st.sampled_from([1, 2, 3]), st.integers(1, 300), st.integers(0, 3000))
def test_a_load_takes_steps_until_it_is_reported(num_batches: int, step: int, load: int) -> None:
    found = StepTime(num_batches).wait_seconds(load, step)
    assert found == begins_after(num_batches, step, load)


def test_in_an_idle_engine_a_load_takes_its_time() -> None:
    steps = StepTime(2)
    assert steps.wait_seconds(0.5, None) == pytest.approx(0.501)


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_steps_are_measured_by_their_plans(num_batches: int) -> None:
    """Decode steps of 10 ms among prefills of 300 ms: a plan comes when a step has ended."""
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
    """Plan ``count`` steps of ``seconds``; returns when the next one is planned."""
    for number in range(count):
        steps.planned(start + number * seconds, follows=True, has_prefill=False)
    return start + count * seconds


def test_one_long_step_counts_little() -> None:
    """Otherwise a compilation of 30 s would end loading for requests after it."""
    steps = StepTime(2)
    now = decode(steps, 0.0, 0.01, 20)
    now = decode(steps, now + 30.0, 0.01, 1)
    assert steps.decode_seconds < 0.03
    decode(steps, now, 0.01, 12)
    assert steps.decode_seconds == pytest.approx(0.01, rel=0.15)


def test_a_store_takes_as_long_as_recent_ones() -> None:
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
    assert stores.wait_seconds(0) == 0.0  # no store to wait for


def test_one_long_store_does_not_lengthen_the_next() -> None:
    stores = StoreBacklog(lambda: 0.0)
    for job_id, seconds in enumerate([0.2, 30.0, 0.2, 40.0, 0.2]):
        stores.planned(job_id)
        stores.ended(job_id, [seconds])
        stores.planned(100 + job_id)
        assert stores.wait_seconds(100 + job_id) == pytest.approx(0.2)


def test_stores_queue_behind_late_ones() -> None:
    """The first store is a second old: the next one waits for at least as long."""
    now = 0.0
    stores = StoreBacklog(lambda: now)
    stores.planned(1)
    now = 1.0
    stores.planned(2)
    assert stores.wait_seconds(2) == pytest.approx(1.0)
    stores.ended(1, [])  # no rank has stored anything
    assert stores.wait_seconds(2) == 0.0
