"""Medians, quartiles and ratios of measurements."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.harness.ratios import Stopwatch, in_turn, median_ratio, median_seconds, spread


def test_a_spread_has_quartiles_of_three_values_or_more() -> None:
    assert spread([1.0, 2.0]) == {"median": 1.5}
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}


def test_a_ratio_is_of_pairs() -> None:
    """A drift that hits both in a round leaves it alone; a round of one alone does not count."""
    assert median_ratio([1.1, 2.2, 4.4], [1.0, 2.0, 4.0, 100.0]) == 1.1


def test_the_first_round_is_not_measured() -> None:
    watch, calls = Stopwatch(), list[int]()
    for number in watch.rounds(2):
        watch.time("work", partial(calls.append, number))
    assert calls == [0, 1, 2]
    assert len(watch.seconds["work"]) == 2
    assert median_seconds(lambda: calls.append(3), repeats=3) >= 0
    assert calls[3:] == [3] * 4


@pytest.mark.parametrize(("number", "order"), [(0, "abc"), (1, "bca"), (5, "cab")])
def test_another_one_goes_first_in_each_round(number: int, order: str) -> None:
    assert in_turn("abc", number) == list(order)
