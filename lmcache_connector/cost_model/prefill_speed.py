"""How fast this instance prefills, fitted to the prefills seen lately.

Computing ``n`` tokens after ``c`` computed ones, while ``r`` other requests run, is taken to
last ::

    a*n + b*n*(c + n/2) + d*n*r   seconds

``a`` is the linear layers, ``b`` attention (each token reads all tokens before it), ``d`` the
share of each step the other requests take. The three are fitted by non-negative least squares over
decayed sums. Errors are absolute seconds: long prefills, for which the decision matters, outweigh
short ones, whose time is mostly the fixed cost of a step.

Not thread-safe; the scheduler side owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
_SCALE = (1e-3, 1e-7, 1e-4)
# Where the data cannot tell (all prefills alike), ``a`` explains it before ``b`` and ``d`` do.
_RIDGE = (1e-6, 1e-4, 1e-4)


@dataclass(slots=True)
class PrefillSpeed:
    """``known`` is false until the first prefill of at least 32 tokens was observed."""

    seconds_per_token: float = 0.0
    seconds_per_token_pair: float = 0.0
    """Per token and token of context."""
    seconds_per_token_and_request: float = 0.0
    known: bool = False
    _xx: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    _xy: list[float] = field(default_factory=lambda: [0.0] * 3)
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
        """Raises ``ValueError`` for negative figures."""
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
        features = (
            num_tokens * _SCALE[0],
            num_tokens * (context_tokens + num_tokens / 2) * _SCALE[1],
            num_tokens * running_requests * _SCALE[2],
        )
        for i, feature in enumerate(features):
            row = self._xx[i]
            for j, other in enumerate(features):
                row[j] = row[j] * keep + feature * other
            self._xy[i] = self._xy[i] * keep + feature * seconds
        self._changed_at = now
        self.known = True
        self._fit()

    def _fit(self) -> None:
        a, b, d = non_negative_solution(self._xx, self._xy, _RIDGE)
        self.seconds_per_token = a * _SCALE[0]
        self.seconds_per_token_pair = b * _SCALE[1]
        self.seconds_per_token_and_request = d * _SCALE[2]


def non_negative_solution(
    xx: list[list[float]], xy: list[float], ridge: tuple[float, ...]
) -> list[float]:
    """Solve the normal equations ``xx @ beta = xy``, each beta at least zero.

    ``ridge[i]`` times the trace is added to the diagonal. The most negative beta is fixed at zero
    and the rest solved again until none is negative: at most as many rounds as there are betas.
    """
    active = list(range(len(xy)))
    trace = sum(xx[i][i] for i in active) or 1.0
    while active:
        matrix = [
            [xx[i][j] + (ridge[i] * trace if i == j else 0.0) for j in active] + [xy[i]]
            for i in active
        ]
        solution = _solve(matrix)
        worst = min(range(len(active)), key=solution.__getitem__)
        if solution[worst] >= 0:
            beta = [0.0] * len(xy)
            for index, value in zip(active, solution, strict=True):
                beta[index] = value
            return beta
        del active[worst]
    return [0.0] * len(xy)


def _solve(matrix: list[list[float]]) -> list[float]:
    """Gaussian elimination of ``[A | y]``, ``A`` positive definite, so no pivoting is needed."""
    size = len(matrix)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size + 1):
                matrix[j][k] -= factor * matrix[i][k]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(matrix[i][k] * solution[k] for k in range(i + 1, size))
        solution[i] = (matrix[i][size] - known) / matrix[i][i]
    return solution
