"""How fast this instance prefills, fitted to the prefills seen lately.

Computing ``n`` tokens after ``c`` computed ones, while ``r`` other requests run, is taken to
last that much longer than a step that computes none ::

    a*n + b*n*(c + n/2) + d*n*r   seconds

``a`` is the linear layers, ``b`` attention (each token reads all tokens before it), ``d`` the
share of each step the other requests take. The three are fitted by non-negative least squares over
decayed sums. Errors are absolute seconds: long prefills, for which the decision matters, outweigh
short ones.

Not thread-safe; the scheduler side owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Matrix: TypeAlias = npt.NDArray[np.float64]

MIN_PREFILL_TOKENS = 32
"""Shorter prefills are not looked at: they last as long as a decode step whatever their length."""
_HALF_LIFE_SECONDS = 600.0
_HALF_LIFE_TOKENS = 65536.0
_SURPRISE_FACTOR = 2.0
_KEEP_AFTER_FAST_SURPRISE = 0.1
"""A prefill twice as fast as predicted: the past was slowed down by something that is gone, such as
compilation at the first prefill."""
_MAX_SLOWNESS = 2.0
"""A prefill slower than this many times the prediction counts as that slow: one hiccup must not
make loading look good. A lasting slowdown gets through in a few observations."""
# Features are scaled to be about 1 for a prefill of 1,000 tokens after 10,000, beside 10 requests.
_SCALE = np.array((1e-3, 1e-7, 1e-4))
# Where the data cannot tell (all prefills alike), ``a`` explains it before ``b`` and ``d`` do.
_RIDGE = np.array((1e-6, 1e-4, 1e-4))


@dataclass(slots=True)
class PrefillSpeed:
    """``known`` is false until the first prefill of at least 32 tokens was observed."""

    seconds_per_token: float = 0.0
    seconds_per_token_pair: float = 0.0
    """Per token and token of context."""
    seconds_per_token_and_request: float = 0.0
    known: bool = False
    _xx: Matrix = field(default_factory=lambda: np.zeros((3, 3)))
    _xy: Matrix = field(default_factory=lambda: np.zeros(3))
    _changed_at: float = 0.0

    def seconds(self, start: int, end: int, running_requests: int = 0) -> float:
        """Predicted seconds to compute tokens ``[start, end)``; 0 when nothing is known."""
        num_tokens = end - start
        return (
            self.seconds_per_token + self.seconds_per_token_and_request * running_requests
        ) * num_tokens + self.seconds_per_token_pair * num_tokens * (start + end) / 2

    def observe(
        self,
        now: float,
        num_tokens: int,
        context_tokens: int,
        seconds: float,
        running_requests: int = 0,
    ) -> None:
        """One step took ``seconds`` for ``num_tokens`` after ``context_tokens``.

        ``now`` is monotonic, in seconds. Raises ``ValueError`` for anything negative.
        """
        if min(num_tokens, context_tokens, running_requests) < 0 or seconds < 0:
            raise ValueError("a prefill has no negative tokens, requests or seconds")
        if num_tokens < MIN_PREFILL_TOKENS:
            return
        keep = 0.5 ** (
            max(0.0, now - self._changed_at) / _HALF_LIFE_SECONDS + num_tokens / _HALF_LIFE_TOKENS
        )
        predicted = self.seconds(context_tokens, context_tokens + num_tokens, running_requests)
        if predicted > 0:
            seconds = min(seconds, _MAX_SLOWNESS * predicted)
        if seconds * _SURPRISE_FACTOR < predicted:
            keep *= _KEEP_AFTER_FAST_SURPRISE
        pairs = num_tokens * (context_tokens + num_tokens / 2)
        features = _SCALE * (num_tokens, pairs, num_tokens * running_requests)
        self._xx = self._xx * keep + np.outer(features, features)
        self._xy = self._xy * keep + features * seconds
        self._changed_at = now
        self.known = True
        self._fit()

    def _fit(self) -> None:
        a, b, d = (non_negative_solution(self._xx, self._xy, _RIDGE) * _SCALE).tolist()
        self.seconds_per_token = a
        self.seconds_per_token_pair = b
        self.seconds_per_token_and_request = d


def non_negative_solution(xx: Matrix, xy: Matrix, ridge: Matrix) -> Matrix:
    """Solve the normal equations ``xx @ beta = xy`` of ``n`` unknowns, each beta at least zero.

    ``xx`` is (n, n) and positive semidefinite, ``xy`` and ``ridge`` are (n,); ``ridge`` times the
    trace is added to the diagonal. The most negative beta is fixed at zero and the rest solved
    again until none is negative: at most as many rounds as there are betas.
    """
    matrix = xx + np.diag(ridge * (xx.trace() or 1.0))
    beta = np.zeros(len(xy))
    active = list(range(len(xy)))
    while active:
        solution = np.linalg.solve(matrix[np.ix_(active, active)], xy[active])
        worst = int(solution.argmin())
        if solution[worst] >= 0:
            beta[active] = solution
            break
        del active[worst]
    return beta
