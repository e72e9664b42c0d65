"""Samples add up over ranks, steps and engines."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.metrics.samples import Samples, Tally

# Numbers that floats add up exactly, in any order.
amounts = st.integers(1, 1 << 20)


@st.composite
def samples(draw: st.DrawFn) -> Samples:
    made = Samples()
    for tier in draw(st.lists(st.sampled_from(["cpu", "redis"]), max_size=4)):
        made.count("loaded_bytes", tier, amount=draw(amounts))
        made.observe("load_seconds", tier, value=draw(amounts))
    if draw(st.booleans()):
        made.set("cpu_used_bytes", draw(st.sampled_from("01")), value=draw(amounts))
    return made


@given(st.lists(samples(), max_size=6), st.integers(0, 6))
def test_samples_add_up_however_they_are_grouped(parts: list[Samples], cut: int) -> None:
    one_by_one, head, tail = Samples(), Samples(), Samples()
    for index, part in enumerate(parts):
        one_by_one.merge(part)
        (head if index < cut else tail).merge(part)
    head.merge(Samples.from_data(json.loads(json.dumps(tail.to_data()))))
    assert head == one_by_one
    assert head.total("loaded_bytes") == sum(p.total("loaded_bytes") for p in parts)


counts = st.tuples(st.sampled_from(["cpu", "redis"]), st.integers(0, 1 << 20))


@given(st.lists(st.one_of(counts, st.none()), max_size=30))
def test_what_was_taken_and_what_is_left_add_up_to_the_totals(
    steps: list[tuple[str, int] | None],
) -> None:
    """``None`` stands for a look at what is new."""
    tally, taken = Tally(), Samples()
    for step in steps:
        if step is None:
            taken.merge(tally.take() or Samples())
        else:
            tier, amount = step
            tally.count("loaded_bytes", tier, amount=amount)
    taken.merge(tally.take() or Samples())
    amounts = [step for step in steps if step is not None]
    for tier in ("cpu", "redis"):
        expected = sum(amount for label, amount in amounts if label == tier)
        assert taken.total("loaded_bytes", tier) == tally.total("loaded_bytes", tier) == expected
    assert tally.total("loaded_bytes") == sum(amount for _, amount in amounts)


def test_gauges_and_observations_are_told_once() -> None:
    tally = Tally()
    tally.set("cpu_used_bytes", "0", value=1.0)
    tally.set("cpu_used_bytes", "0", value=2.0)
    tally.observe("load_seconds", "cpu", value=0.1)
    tally.observe("load_seconds", "cpu", value=0.2)
    taken = tally.take()
    assert taken is not None
    assert taken.gauge_values("cpu_used_bytes") == [2.0]
    assert taken.observed("load_seconds", "cpu") == [0.1, 0.2]
    assert tally.take() is None
    assert tally.totals.is_empty


def test_a_negative_count_is_the_callers_bug_and_changes_nothing() -> None:
    tally = Tally()
    with pytest.raises(ValueError, match="lookups must not shrink"):
        tally.count("lookups", "redis", amount=-1)
    assert tally.total("lookups") == 0
    assert tally.take() is None
