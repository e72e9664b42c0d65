"""Latency and bandwidth come out of loads of several sizes, and follow a link that changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.cost_model.tier_speed import TierSpeed

MIB = 1 << 20


def loads(link: TierSpeed, sizes: list[int], latency: float, bytes_per_second: float) -> None:
    for size in sizes:
        link.arrived(0.0, size, latency + size / bytes_per_second)


@given(
    latency=st.floats(0, 0.5),
    bytes_per_second=st.floats(1e6, 1e10),
    sizes=st.lists(st.integers(1, 200).map(lambda n: n * MIB), min_size=2, max_size=10),
)
def test_an_exact_line_is_found(latency: float, bytes_per_second: float, sizes: list[int]) -> None:
    link = TierSpeed()
    loads(link, [*sizes, 1 * MIB, 64 * MIB], latency, bytes_per_second)
    for size in (1 * MIB, 64 * MIB):
        assert link.seconds(size) == pytest.approx(latency + size / bytes_per_second, rel=1e-2)


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
    link = TierSpeed()
    for now, (num_bytes, seconds, cut) in enumerate(history):
        (link.cut_off if cut else link.arrived)(float(now), num_bytes, seconds)
        assert link.latency_seconds >= 0
        assert link.seconds_per_byte >= 0
        assert link.seconds(num_bytes) > 0
        assert link.seconds_at_worst(2 * num_bytes) >= link.seconds(2 * num_bytes) * (1 - 1e-9)
        assert 0.1 <= link.spread <= 1
        assert 0 < link.failure_rate < 1


def test_nothing_known_predicts_nothing() -> None:
    link = TierSpeed()
    assert not link.known
    assert link.seconds(MIB) == 0
    assert link.bytes_per_second == float("inf")


def test_a_calibration_is_taken_at_its_word() -> None:
    link = TierSpeed()
    link.calibrate(0.0, bytes_per_second=100e6, latency_seconds=0.2)
    assert link.latency_seconds == pytest.approx(0.2, rel=1e-3)
    assert link.bytes_per_second == pytest.approx(100e6, rel=1e-3)
    assert link.seconds_at_worst(512 * MIB) == link.seconds(512 * MIB)


def test_loads_of_one_size_are_split_by_the_calibrated_latency() -> None:
    link = TierSpeed()
    link.calibrate(0.0, bytes_per_second=100e6, latency_seconds=0.2)
    loads(link, [10 * MIB] * 30, latency=0.2, bytes_per_second=50e6)
    assert link.latency_seconds == pytest.approx(0.2, rel=0.05)
    assert link.bytes_per_second == pytest.approx(50e6, rel=0.05)


def test_loads_of_one_size_alone_are_all_bandwidth() -> None:
    link = TierSpeed()
    loads(link, [10 * MIB] * 3, latency=0.2, bytes_per_second=100e6)
    assert link.latency_seconds == 0
    assert link.seconds(20 * MIB) == pytest.approx(2 * (0.2 + 10 * MIB / 100e6))


def test_a_bet_on_a_larger_load_than_any_seen_expects_proportion() -> None:
    link = TierSpeed()
    loads(link, [1 * MIB, 2 * MIB], latency=0.2, bytes_per_second=1e9)
    assert link.seconds(20 * MIB) == pytest.approx(0.2 + 20 * MIB / 1e9, rel=1e-3)
    assert link.seconds_at_worst(20 * MIB) == pytest.approx(10 * link.seconds(2 * MIB))


@pytest.mark.parametrize("factor", [10, 1 / 10])
def test_three_loads_are_enough_to_follow_a_tenfold_change(factor: float) -> None:
    link = TierSpeed()
    sizes = [10 * MIB, 20 * MIB, 40 * MIB]
    loads(link, sizes * 10, latency=0.01, bytes_per_second=1e8)
    loads(link, sizes, latency=0.01, bytes_per_second=1e8 * factor)
    assert link.seconds(20 * MIB) == pytest.approx(0.01 + 20 * MIB / (1e8 * factor), rel=0.3)


def test_a_load_that_brings_nothing_stalls_the_link_until_one_arrives() -> None:
    link = TierSpeed()
    loads(link, [MIB], 0.0, 1e8)
    link.cut_off(1.0, 0, 0.5)
    assert link.stalled
    link.arrived(2.0, MIB, MIB / 1e8)
    assert not link.stalled


def test_a_deadline_too_short_for_a_link_that_keeps_its_speed_is_no_stall() -> None:
    link = TierSpeed()
    loads(link, [10 * MIB], 0.0, 1e8)
    before = link.failure_rate
    link.cut_off(1.0, 4 * MIB, 4 * MIB / 1e8)
    assert not link.stalled
    assert link.failure_rate <= before


def test_a_link_that_stops_halfway_has_stalled() -> None:
    link = TierSpeed()
    loads(link, [10 * MIB], 0.0, 1e8)
    link.cut_off(1.0, 4 * MIB, 40 * MIB / 1e8)
    assert link.stalled


def test_the_first_load_cut_off_still_measures_the_link() -> None:
    link = TierSpeed()
    link.cut_off(0.0, 4 * MIB, 0.5)
    assert link.known
    assert not link.stalled
    assert link.seconds(4 * MIB) == pytest.approx(0.5)


def test_failures_fade_as_loads_arrive_and_one_stall_counts_once() -> None:
    link = TierSpeed()
    fresh = link.failure_rate
    link.cut_off(0.0, 0, 1.0)
    once = link.failure_rate
    link.cut_off(1.0, 0, 1.0)
    assert link.failure_rate == once > fresh
    loads(link, [MIB] * 10, 0.0, 1e8)
    assert link.failure_rate < (once + fresh) / 2


def test_old_figures_weigh_little() -> None:
    young, old = TierSpeed(), TierSpeed()
    for link, now in ((young, 1.0), (old, 6000.0)):
        link.arrived(0.0, 10 * MIB, 1.0)
        link.arrived(now, 10 * MIB, 1.5)
    assert old.seconds(10 * MIB) > young.seconds(10 * MIB)
    assert old.seconds(10 * MIB) == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("figures", [(0, 1.0), (-1, 1.0), (1, -1.0)])
def test_impossible_loads_are_the_callers_bug(figures: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="no load moves"):
        TierSpeed().arrived(0.0, *figures)


@pytest.mark.parametrize("figures", [(0.0, 0.0), (-1.0, 0.0), (1e6, -0.1)])
def test_impossible_calibrations_are_the_callers_bug(figures: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="calibration"):
        TierSpeed().calibrate(0.0, *figures)
