"""How fast one tier answers: latency and bandwidth, fitted to recent loads.

Model: a load of ``x`` bytes lasts ``latency + x / bandwidth`` seconds. Errors are divided by
``x + 8 MiB``: they count about relative to the time, so that big loads do not drown what small
loads say about latency. Times are arguments, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from lmcache_connector.cost_model.fit import FadingFit

_KEEP_PER_LOAD = 0.75
"""Weight of the past after each load: about the last four decide, because a tier's speed changes
within seconds with its other users."""
_KEEP_AFTER_SLOW_SURPRISE = 0.2
"""A load twice as slow as predicted: the tier has probably changed, or only hiccupped."""
_KEEP_AFTER_FAST_SURPRISE = 0.02
"""A load twice as fast as predicted: no load is fast by accident, so the past is out of date. Not
zero, because it takes two sizes to tell latency from bandwidth."""
_SURPRISE_FACTOR = 2.0
QUIET_SECONDS = 60.0
"""After so long without news, a tier may be tried again."""
_FIRST_QUIET_SECONDS = 1.0
"""The same after a tier's first loads, which may have met a hiccup; doubles with each load and each
trial, up to a minute."""
_SIZE_OFFSET_BYTES = 8 << 20
_STALL_FACTOR = 3.0
"""A load cut off after this many times its predicted time counts as stalled."""
_KEEP_COUNTS = 0.9
"""Failures fade slower than speeds: a tier that stalls now and then looks fast in between."""
_PRIOR_LOADS, _PRIOR_FAILURE_RATE = 5.0, 0.02
_MIN_SECONDS = 1e-6  # a coarse clock may measure 0


class TierSpeed:
    """What is known of one tier.

    A load of ``x`` bytes from the idle tier takes ``latency_seconds + x * seconds_per_byte``; both
    are 0 if unknown. ``failure_rate``: fading share of loads that stalled or broke; 2 % without
    any. ``known`` is false until a load was measured. ``stalled`` is true from a load that hung or
    broke until a load or probe arrives. If a tier is not ``probed``, only a request's load can
    show the end of a stall, so the stall expires like any outdated measurement.
    """

    def __init__(self, probed: bool = True) -> None:
        self.probed = probed
        self.known = self.stalled = False
        # If all loads had one size, bandwidth explains them.
        self._fit = FadingFit(scale=(1.0, 1.0 / _SIZE_OFFSET_BYTES), ridge=(1e-4, 1e-8))
        self.latency_seconds = self.seconds_per_byte = 0.0
        self.last_load = 0, 0.0  # bytes and seconds, its latency included
        self._num_good = self._num_failed = 0.0
        self.failure_rate = _PRIOR_FAILURE_RATE
        self._changed_at = 0.0
        self.heard_at = -inf  # end of the last load or measurement, good or bad
        self._quiet_seconds = _FIRST_QUIET_SECONDS
        self._starts_anew = True  # drop the past with the next load

    def seconds(self, num_bytes: float) -> float:
        """Predicted seconds of one load from an idle tier; 0 if unknown."""
        return self.latency_seconds + num_bytes * self.seconds_per_byte

    def measured(self, now: float, loads: Sequence[tuple[int, float]]) -> None:
        """Bytes and seconds of loads made to measure the tier, as by a probe; empty if the tier
        answered but had nothing to read. They replace the past, and count as one load that arrived,
        unless they end a stall: a tier may answer probes, and stall with every load."""
        self.heard_at = now
        if loads and not self.stalled:
            self._count(failed=False)
        self._starts_anew |= bool(loads)
        for num_bytes, seconds in loads:
            self._observe(now, num_bytes, seconds)
            self._quiet_seconds = QUIET_SECONDS
        self.stalled = False

    def is_outdated(self, now: float) -> bool:
        """Whether there was no news for a minute, or for some seconds if little was known before.
        The stall of a probed tier does not expire."""
        is_kept = self.stalled and self.probed
        return not is_kept and now - self._changed_at >= self._quiet_seconds

    def untried(self) -> TierSpeed:
        """The tier as a request on trial sees it: unknown, but for its failure rate."""
        fresh = TierSpeed(self.probed)
        fresh.failure_rate = self.failure_rate
        return fresh

    def tried(self, now: float) -> None:
        """One request tries an outdated tier. For all others, what is known counts for another
        while, or until a load is measured."""
        self._changed_at, self._starts_anew = now, True
        self._quiet_seconds = min(2 * self._quiet_seconds, QUIET_SECONDS)

    def arrived(self, now: float, num_bytes: int, seconds: float) -> None:
        """A load got everything it asked this tier for: ``num_bytes`` for one rank, without chunks
        that another load fetched, in ``seconds``, without the queue."""
        self.heard_at = now
        self._observe(now, num_bytes, seconds)
        self._count(failed=False)
        self.stalled = False

    def cut_off(self, now: float, num_bytes: int, seconds: float) -> None:
        """A load ended early after ``num_bytes`` arrived: its deadline passed or the tier failed.
        Not for loads that never began, nor for missing chunks: neither tells the tier's speed.

        If these bytes took about as long as predicted, the tier has not failed: the deadline was
        too short, and the load measures the tier like any other.
        """
        self.heard_at = now
        predicted = max(self.seconds(num_bytes), _MIN_SECONDS)
        hung = num_bytes == 0 or (self.known and seconds > _STALL_FACTOR * predicted)
        if not (hung and self.stalled):  # a stall counts as one failure
            self._count(failed=hung)
        self.stalled = hung
        self.last_load = 0, inf
        if num_bytes > 0:
            self._observe(now, num_bytes, seconds)
        elif not self.probed:
            self._changed_at = now

    def _observe(self, now: float, num_bytes: int, seconds: float) -> None:
        seconds = max(seconds, _MIN_SECONDS)
        predicted = max(self.seconds(num_bytes), _MIN_SECONDS)
        keep = _KEEP_PER_LOAD
        if self._starts_anew:
            keep = 0.0
        elif seconds * _SURPRISE_FACTOR < predicted:
            keep = _KEEP_AFTER_FAST_SURPRISE
        elif seconds > predicted * _SURPRISE_FACTOR:
            keep = _KEEP_AFTER_SLOW_SURPRISE
        weight = _SIZE_OFFSET_BYTES / (num_bytes + _SIZE_OFFSET_BYTES)
        self._fit.observe(weight, weight * num_bytes, weight * seconds, keep)
        self.latency_seconds, self.seconds_per_byte = self._fit.coefficients
        self._changed_at, self.last_load = now, (num_bytes, seconds)
        self.known, self._starts_anew = True, False

    def _count(self, failed: bool) -> None:
        self._num_good = self._num_good * _KEEP_COUNTS + (not failed)
        self._num_failed = self._num_failed * _KEEP_COUNTS + failed
        num_loads = self._num_good + self._num_failed + _PRIOR_LOADS
        self.failure_rate = (self._num_failed + _PRIOR_LOADS * _PRIOR_FAILURE_RATE) / num_loads
        self._quiet_seconds = min(2 * self._quiet_seconds, QUIET_SECONDS)
