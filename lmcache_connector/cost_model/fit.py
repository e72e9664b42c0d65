"""Least squares with fading sums: each observation costs one small solve, and no history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Matrix: TypeAlias = npt.NDArray[np.float64]


class FadingFit:
    """``seconds = features @ coefficients``, with coefficients of at least zero.

    ``scale`` brings features to about 1. Where observations cannot tell two coefficients apart, the
    one with the smaller ``ridge`` gets the weight.
    """

    def __init__(self, scale: Sequence[float], ridge: Sequence[float]) -> None:
        self._scale, self._ridge = np.array(scale), np.array(ridge)
        self._xx: Matrix = np.zeros((len(scale), len(scale)))
        self._xy: Matrix = np.zeros(len(scale))
        self.coefficients = [0.0] * len(scale)

    def observe(self, features: Sequence[float], seconds: float, keep: float) -> None:
        """``keep``: the weight left to earlier observations."""
        x = self._scale * features
        self._xx = self._xx * keep + np.outer(x, x)
        self._xy = self._xy * keep + x * seconds
        solution = non_negative_solution(self._xx, self._xy, self._ridge)
        self.coefficients = (solution * self._scale).tolist()


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
