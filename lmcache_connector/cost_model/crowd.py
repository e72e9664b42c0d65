"""How long the compute of a prompt is waited for by all that have no first token yet.

They are computed in the order they came, ``max_step_tokens`` in a step, and each has its first
token when the step ends that completes its prompt. So those that one step completes wait for all
its tokens, and a crowd that fills several steps waits for each step's own length as well, however
little a prompt adds to it ::

    tokens    |.a.|.b.|.c.|.d.|.e.|
    steps     |----1----|----2----|-3-|      a and b wait for 1 step, c and d for 2, e for 3

Their prompts are taken to be of one length.
"""

from __future__ import annotations

from math import ceil
from statistics import fmean

_MAX_LOOKED_AT = 16
"""Of a crowd's requests, spread over it: it bounds the time."""


def crowd_waits(num_requests: int, num_steps: float) -> tuple[float, float]:
    """What the requests wait for, on average, whose tokens fill so many steps: steps, and the share
    of all their tokens that those compute. ``num_steps`` counts a part of a step as a part."""
    if num_steps <= 1:
        return 1.0, 1.0
    looked_at = min(num_requests, _MAX_LOOKED_AT)
    ends = [ceil(num_steps * (i + 1) / looked_at) for i in range(looked_at)]
    return fmean(ends), fmean(min(end, num_steps) for end in ends) / num_steps
