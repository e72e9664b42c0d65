"""How fast this instance prefills, fitted to recent prefills.

Model: computing ``n`` tokens after ``c`` computed ones makes a step longer by ::

    a*n + b*n*(c + n/2)   seconds

``a`` stands for the linear layers, ``b`` for attention (each token reads all tokens before it).
Without ``b``, beside prompts of 61,440 tokens, hits of 2,048 over a bus of 3 GB/s took 1.38 times
as long as recompute, and 1.00 with it (``benchmarks.gpu_storms``).

Errors are absolute seconds: long prefills, for which the decision matters, outweigh short ones.
"""

from __future__ import annotations

from lmcache_connector.cost_model.fit import FadingFit

MIN_PREFILL_TOKENS = 32
"""Shorter prefills are ignored: they last as long as a decode step."""
_HALF_LIFE_SECONDS = 600.0
_HALF_LIFE_TOKENS = 65536.0
_SURPRISE_FACTOR = 2.0
_KEEP_AFTER_FAST_SURPRISE = 0.1
"""Weight of the past after a prefill twice as fast as predicted: whatever slowed the past down is
gone, such as compilation at the first prefill."""
_MAX_SLOWNESS = 2.0
"""A slower prefill counts as this many times the prediction: one hiccup must not favour loading. A
lasting slowdown shows within a few observations."""


class PrefillSpeed:
    """``known`` is false until a prefill of at least 32 tokens was observed."""

    def __init__(self) -> None:
        self.known = False
        # Features are about 1 for 1,000 tokens after 10,000; if all prefills are alike, only ``a``
        # explains them.
        self._fit = FadingFit(scale=(1e-3, 1e-7), ridge=(1e-6, 1e-4))
        self._changed_at = 0.0

    def seconds(self, start: int, end: int) -> float:
        """Predicted seconds to compute tokens ``[start, end)``; 0 if unknown."""
        a, b = self._fit.coefficients
        return (a + b * (start + end) / 2) * (end - start)

    def observe(self, now: float, num_tokens: int, context_tokens: int, seconds: float) -> None:
        """One step took ``seconds`` for ``num_tokens`` after ``context_tokens``. ``now`` is
        monotonic, in seconds."""
        if num_tokens < MIN_PREFILL_TOKENS:
            return
        age_seconds = max(0.0, now - self._changed_at)
        keep = 0.5 ** (age_seconds / _HALF_LIFE_SECONDS + num_tokens / _HALF_LIFE_TOKENS)
        predicted = self.seconds(context_tokens, context_tokens + num_tokens)
        if predicted > 0:
            seconds = min(seconds, _MAX_SLOWNESS * predicted)
        if seconds * _SURPRISE_FACTOR < predicted:
            keep *= _KEEP_AFTER_FAST_SURPRISE
        pairs = num_tokens * (context_tokens + num_tokens / 2)
        self._fit.observe(num_tokens, pairs, seconds, keep)
        self._changed_at, self.known = now, True
