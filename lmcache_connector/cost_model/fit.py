"""Least squares with fading sums: each observation costs a few products, and no history."""

from __future__ import annotations


class FadingFit:
    """``seconds = a * x + b * y``, with ``coefficients`` (a, b) of at least zero.

    ``scale`` brings x and y to about 1. Where observations cannot tell a from b, the one with the
    smaller ``ridge`` gets the weight.
    """

    def __init__(self, scale: tuple[float, float], ridge: tuple[float, float]) -> None:
        self._scale, self._ridge = scale, ridge
        self._sums: tuple[float, ...] = (0.0,) * 5  # of xx, xy, yy, x * seconds, y * seconds
        self.coefficients = (0.0, 0.0)

    def observe(self, x: float, y: float, seconds: float, keep: float) -> None:
        """``keep``: the weight left to earlier observations."""
        x, y = x * self._scale[0], y * self._scale[1]
        new = (x * x, x * y, y * y, x * seconds, y * seconds)
        self._sums = tuple(keep * old + each for old, each in zip(self._sums, new, strict=True))
        xx, xy, yy, xs, ys = self._sums
        trace = xx + yy or 1.0
        xx, yy = xx + self._ridge[0] * trace, yy + self._ridge[1] * trace
        determinant = xx * yy - xy * xy
        a, b = (xs * yy - ys * xy) / determinant, (ys * xx - xs * xy) / determinant
        if a < 0:
            a, b = 0.0, ys / yy
        elif b < 0:
            a, b = xs / xx, 0.0
        self.coefficients = (a * self._scale[0], b * self._scale[1])
