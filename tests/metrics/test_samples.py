"""Samples add up over ranks, steps and engines."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.metrics.samples import Samples

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


def test_a_counter_never_shrinks() -> None:
    with pytest.raises(ValueError, match="loaded_bytes must not shrink"):
        Samples().count("loaded_bytes", "cpu", amount=-1)
