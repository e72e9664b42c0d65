"""What a crowd waits for: against a count of each request's own steps."""

from __future__ import annotations

from math import ceil
from statistics import fmean

import pytest

from lmcache_connector.cost_model.steps import crowd_waits

STEP_TOKENS = 1000


def counted(num_requests: int, prompt_tokens: int) -> tuple[float, float]:
    """Steps until each has its first token, and the tokens computed by then."""
    num_tokens = num_requests * prompt_tokens
    ends = [ceil((i + 1) * prompt_tokens / STEP_TOKENS) for i in range(num_requests)]
    return fmean(ends), fmean(min(end * STEP_TOKENS, num_tokens) for end in ends) / num_tokens


@pytest.mark.parametrize("num_requests", [1, 2, 5, 16])
@pytest.mark.parametrize("prompt_tokens", [1, 62, 400, 500, 512, 1000, 4100])
def test_each_of_a_few_waits_for_its_own_step(num_requests: int, prompt_tokens: int) -> None:
    waits = crowd_waits(num_requests, num_requests * prompt_tokens / STEP_TOKENS)
    assert waits == pytest.approx(counted(num_requests, prompt_tokens))


@pytest.mark.parametrize("num_requests", [17, 100, 5000])
@pytest.mark.parametrize("prompt_tokens", [1, 62, 512, 4100])
def test_of_many_some_are_looked_at(num_requests: int, prompt_tokens: int) -> None:
    waits = crowd_waits(num_requests, num_requests * prompt_tokens / STEP_TOKENS)
    assert waits == pytest.approx(counted(num_requests, prompt_tokens), rel=0.15)
