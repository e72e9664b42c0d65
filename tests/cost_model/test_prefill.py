"""Prefill speed as a function of length, context and company is found from what was seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.cost_model.fit import Matrix, non_negative_solution
from lmcache_connector.cost_model.prefill import PrefillSpeed

A, B, D = 1e-4, 3e-9, 2e-6


def true_seconds(num_tokens: int, context: int, running: int = 0) -> float:
    return num_tokens * (A + B * (context + num_tokens / 2) + D * running)


def observed(*prefills: tuple[int, int, int]) -> PrefillSpeed:
    speed = PrefillSpeed()
    for num_tokens, context, running in prefills:
        seconds = true_seconds(num_tokens, context, running)
        speed.observe(0.0, num_tokens, context, seconds, running)
    return speed


def test_length_context_and_company_are_told_apart() -> None:
    speed = observed(*[(2048, c, r) for c in range(0, 32768, 4096) for r in (0, 8, 32)])
    for start, end, running in ((0, 8192, 0), (0, 32768, 4), (30000, 32768, 16)):
        expected = true_seconds(end - start, start, running)
        assert speed.seconds(start, end, running) == pytest.approx(expected, rel=0.03)


def test_chunked_prefill_adds_up_to_the_whole() -> None:
    speed = observed((2048, 0, 0), (2048, 2048, 0), (2048, 4096, 0), (2048, 16384, 0))
    parts = sum(speed.seconds(start, start + 1000) for start in range(0, 8000, 1000))
    assert parts == pytest.approx(speed.seconds(0, 8000))


def test_a_slow_first_prefill_is_forgotten_at_the_next() -> None:
    speed = PrefillSpeed()
    speed.observe(0.0, 4096, 0, 30.0)  # compilation
    speed.observe(1.0, 4096, 0, true_seconds(4096, 0))
    speed.observe(2.0, 4096, 0, true_seconds(4096, 0))
    assert speed.seconds(0, 4096) < 3 * true_seconds(4096, 0)


def test_one_hiccup_hardly_counts_and_a_lasting_slowdown_does() -> None:
    speed = observed(*[(4096, 0, 0)] * 8)
    normal = speed.seconds(0, 4096)
    speed.observe(0.0, 4096, 0, 100 * normal)
    assert speed.seconds(0, 4096) < 1.3 * normal
    for _ in range(60):
        speed.observe(0.0, 4096, 0, 4 * normal)
    assert speed.seconds(0, 4096) > 3 * normal


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1e4), st.integers(0, 1000)
        ),
        max_size=30,
    )
)
def test_no_history_makes_compute_negative(history: list[tuple[int, int, float, int]]) -> None:
    speed = PrefillSpeed()
    for now, (num_tokens, context, seconds, running) in enumerate(history):
        speed.observe(float(now), num_tokens, context, seconds, running)
        assert speed.seconds(100, 5000, running) >= 0
        assert speed.seconds(100, 5000) >= speed.seconds(200, 5000) >= 0


@given(st.lists(st.tuples(*[st.floats(0, 10)] * 4), min_size=3, max_size=20))
def test_the_non_negative_solution_is_no_worse_than_nothing(
    rows: list[tuple[float, float, float, float]],
) -> None:
    table = np.array(rows)
    x, y = table[:, :3], table[:, 3]
    xx, ridge = x.T @ x, np.full(3, 1e-6)

    def loss(beta: Matrix) -> float:
        error = ((x @ beta - y) ** 2).sum()
        return float(error + (ridge * (xx.trace() or 1.0) * beta**2).sum())

    beta = non_negative_solution(xx, x.T @ y, ridge)
    assert beta.min() >= 0
    assert loss(beta) <= loss(np.zeros(3)) * (1 + 1e-6) + 1e-6
