"""A tally tells everything once, and keeps the totals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.metrics.samples import Samples, Tally

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


def test_nothing_new_is_nothing() -> None:
    tally = Tally()
    assert tally.take() is None
    tally.count("lookups", "redis", amount=0)
    assert tally.take() is None
    tally.count("lookups", "redis")
    assert tally.take() == Samples(counters={"lookups\nredis": 1})
    assert tally.take() is None


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


def test_what_was_taken_no_longer_changes() -> None:
    tally = Tally()
    tally.count("lookups", "redis")
    taken = tally.take()
    tally.count("lookups", "redis", amount=5)
    assert taken == Samples(counters={"lookups\nredis": 1})
    assert tally.total("lookups") == 6


def test_a_negative_count_is_the_callers_bug_and_changes_nothing() -> None:
    tally = Tally()
    with pytest.raises(ValueError, match="lookups must not shrink"):
        tally.count("lookups", "redis", amount=-1)
    assert tally.total("lookups") == 0
    assert tally.take() is None
