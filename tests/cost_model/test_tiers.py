"""Latency and bandwidth come out of loads of several sizes, and follow a tier that changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def test_an_exact_line_is_found(latency: float, bytes_per_second: float, sizes: list[int]) -> None:
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


def test_loads_of_one_size_alone_are_all_bandwidth() -> None:
    tier = TierSpeed()
    loads(tier, [10 * MIB] * 3, latency=0.2, bytes_per_second=100e6)
    assert tier.latency_seconds == pytest.approx(0, abs=1e-4)
    assert tier.seconds(20 * MIB) == pytest.approx(2 * (0.2 + 10 * MIB / 100e6), rel=1e-3)


@pytest.mark.parametrize("factor", [10, 1 / 10])
def test_three_loads_are_enough_to_follow_a_tenfold_change(factor: float) -> None:
    tier = TierSpeed()
    sizes = [10 * MIB, 20 * MIB, 40 * MIB]
    loads(tier, sizes * 10, latency=0.01, bytes_per_second=1e8)
    loads(tier, sizes, latency=0.01, bytes_per_second=1e8 * factor)
    assert tier.seconds(20 * MIB) == pytest.approx(0.01 + 20 * MIB / (1e8 * factor), rel=0.3)


def test_a_load_that_brings_nothing_stalls_the_tier_until_one_arrives() -> None:
    tier = TierSpeed()
    loads(tier, [MIB], 0.0, 1e8)
    tier.cut_off(1.0, 0, 0.5)
    assert tier.stalled
    tier.arrived(2.0, MIB, MIB / 1e8)
    assert not tier.stalled


def test_a_deadline_too_short_for_a_tier_that_keeps_its_speed_is_no_stall() -> None:
    tier = TierSpeed()
    loads(tier, [10 * MIB], 0.0, 1e8)
    before = tier.failure_rate
    tier.cut_off(1.0, 4 * MIB, 4 * MIB / 1e8)
    assert not tier.stalled
    assert tier.failure_rate <= before


def test_a_tier_that_stops_halfway_has_stalled() -> None:
    tier = TierSpeed()
    loads(tier, [10 * MIB], 0.0, 1e8)
    tier.cut_off(1.0, 4 * MIB, 40 * MIB / 1e8)
    assert tier.stalled


def test_failures_fade_as_loads_arrive_and_one_stall_counts_once() -> None:
    tier = TierSpeed()
    fresh = tier.failure_rate
    tier.cut_off(0.0, 0, 1.0)
    once = tier.failure_rate
    tier.cut_off(1.0, 0, 1.0)
    assert tier.failure_rate == once > fresh
    loads(tier, [MIB] * 10, 0.0, 1e8)
    assert tier.failure_rate < (once + fresh) / 2


def test_a_try_knows_nothing_but_failures_and_the_next_load_settles_it() -> None:
    tier = TierSpeed()
    loads(tier, [10 * MIB] * 3, latency=0.0, bytes_per_second=1e7)
    tier.cut_off(0.0, 0, 1.0)
    tried = tier.tried(60.0)
    assert not tried.known
    assert not tried.stalled
    assert tried.failure_rate == tier.failure_rate
    tier.arrived(61.0, MIB, MIB / 1e9)
    assert tier.seconds(MIB) == pytest.approx(MIB / 1e9, rel=1e-2)


def test_measurements_are_outdated_after_a_quiet_minute_but_a_stall_is_not() -> None:
    tier = TierSpeed()
    tier.measured(0.0, [(MIB, 1e-3)])
    tier.arrived(10.0, MIB, 0.1)
    assert not tier.is_outdated(69.9)
    assert tier.is_outdated(70.0)
    tier.cut_off(70.0, 0, 1.0)
    assert not tier.is_outdated(500.0)


def test_the_first_loads_count_for_seconds_and_the_next_ones_longer() -> None:
    """It may have been a hiccup; a tier that stays slow is tried less and less."""
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
def test_a_probe_that_arrives_makes_failures_fade(probe: list[tuple[int, float]]) -> None:
    """As one load does, however many it made; one with nothing to read ends the stall alone."""
    tier = TierSpeed()
    tier.cut_off(0.0, 0, 1.0)
    before = tier.failure_rate
    tier.measured(1.0, probe)
    assert not tier.stalled
    assert tier.known == bool(probe)
    assert tier.failure_rate == before  # that the stall is over says nothing of the next load
    tier.measured(2.0, probe)
    once = TierSpeed()
    once.cut_off(0.0, 0, 1.0)
    once.arrived(1.0, MIB, 0.01)
    assert tier.failure_rate == (once.failure_rate if probe else before)
