"""How fast one tier answers: latency and bandwidth, fitted to the loads seen lately.

A load of ``x`` bytes is taken to last ``latency + x / bandwidth`` seconds. Errors are divided by
``x + 8 MiB``: they count about relative to the time, and a big load does not drown what small ones
say about latency. Times come in as arguments, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_connector.cost_model.fit import FadingFit

_KEEP_PER_LOAD = 0.75
"""Weight older loads keep after one more: the last four or so decide. A tier's speed depends on
its neighbours and changes within seconds; old measurements are worth little."""
_KEEP_AFTER_SLOW_SURPRISE = 0.2
"""A load twice as slow as predicted: the tier has probably changed, possibly only hiccupped."""
_KEEP_AFTER_FAST_SURPRISE = 0.02
"""A load twice as fast as predicted: nothing is fast by accident, so the past is out of date. Not
zero: two sizes are needed to tell latency from bandwidth."""
_SURPRISE_FACTOR = 2.0
QUIET_SECONDS = 60.0
"""What was learned counts for no longer against a tier that is not loaded from."""
_FIRST_QUIET_SECONDS = 1.0
"""What the first loads of requests show may as well be a hiccup: it counts for so long, doubled
with each load and each try, up to a minute."""
_SIZE_OFFSET_BYTES = 8 << 20
_STALL_FACTOR = 3.0
"""A load cut off after this many times what its bytes should have taken counts as stalled."""
_KEEP_COUNTS = 0.9
"""Slower than speeds fade: a tier that stalls now and then looks well in between."""
_PRIOR_LOADS, _PRIOR_FAILURE_RATE = 5.0, 0.02
_MIN_SECONDS = 1e-6  # a coarse clock may show nothing at all


class TierSpeed:
    """What is known of one tier.

    ``known`` is false until a load told something; ``stalled`` is true from a load that hung or
    broke until the next one that arrived. Where a tier is not ``probed``, nothing but a load of a
    request can tell that a stall is over: it ends by itself, as what was learned does.
    """

    def __init__(self, probed: bool = True) -> None:
        self.probed = probed
        self.known = self.stalled = False
        # Loads that all had one size are explained by bandwidth.
        self._fit = FadingFit(scale=(1.0, 1.0 / _SIZE_OFFSET_BYTES), ridge=(1e-4, 1e-8))
        self._num_good = self._num_failed = 0.0
        self._changed_at = 0.0
        self._quiet_seconds = _FIRST_QUIET_SECONDS
        self._starts_anew = True  # with the next load, whatever was seen before

    @property
    def latency_seconds(self) -> float:
        return self._fit.coefficients[0]

    @property
    def seconds_per_byte(self) -> float:
        return self._fit.coefficients[1]

    @property
    def bytes_per_second(self) -> float:
        """Infinite when nothing is known."""
        return 1.0 / self.seconds_per_byte if self.seconds_per_byte else float("inf")

    def seconds(self, num_bytes: float) -> float:
        """Predicted seconds of one load of that size from an idle tier; 0 when nothing is known."""
        return self.latency_seconds + num_bytes * self.seconds_per_byte

    @property
    def failure_rate(self) -> float:
        """Decayed share of loads that stalled or broke; 2 % with nothing seen."""
        failed = self._num_failed + _PRIOR_LOADS * _PRIOR_FAILURE_RATE
        return failed / (self._num_failed + self._num_good + _PRIOR_LOADS)

    def measured(self, now: float, loads: Sequence[tuple[int, float]]) -> None:
        """Bytes and seconds of loads that were made for their own sake, as by a probe; none if the
        tier has answered and there was nothing to read. They take the place of what was known, and
        count as one load that arrived. Those that end a stall do not: a tier may bring what is
        measured, and stall with every load after it."""
        if loads and not self.stalled:
            self._count(failed=False)
        self._starts_anew |= bool(loads)
        for num_bytes, seconds in loads:
            self._observe(now, num_bytes, seconds)
            self._quiet_seconds = QUIET_SECONDS
        self.stalled = False

    def is_outdated(self, now: float) -> bool:
        """Whether nothing was heard of it for a minute, or for some seconds where little was
        before. The stall of a probed tier does not end by itself."""
        is_kept = self.stalled and self.probed
        return not is_kept and now - self._changed_at >= self._quiet_seconds

    def tried(self, now: float) -> TierSpeed:
        """One request tries what is outdated: for all others it counts for another while, or until
        a load tells more. Returns the tier as that request takes it: nothing is known but how often
        it has failed."""
        self._changed_at, self._starts_anew = now, True
        self._quiet_seconds = min(2 * self._quiet_seconds, QUIET_SECONDS)
        fresh = TierSpeed(self.probed)
        fresh._num_good, fresh._num_failed = self._num_good, self._num_failed
        return fresh

    def arrived(self, now: float, num_bytes: int, seconds: float) -> None:
        """A load that brought all its bytes."""
        self._observe(now, num_bytes, seconds)
        self._count(failed=False)
        self.stalled = False

    def cut_off(self, now: float, num_bytes: int, seconds: float) -> None:
        """A load that ended early, ``num_bytes`` of it in time.

        It is no failure of the tier if those bytes took about as long as they should have: then
        its deadline was too short, and the speed it showed is as good as any.
        """
        predicted = max(self.seconds(num_bytes), _MIN_SECONDS)
        hung = num_bytes == 0 or (self.known and seconds > _STALL_FACTOR * predicted)
        if not (hung and self.stalled):  # one failure more of the same stall is nothing new
            self._count(failed=hung)
        self.stalled = hung
        if num_bytes > 0:
            self._observe(now, num_bytes, seconds)
        elif not self.probed:
            self._changed_at = now

    def _observe(self, now: float, num_bytes: int, seconds: float) -> None:
        seconds = max(seconds, _MIN_SECONDS)
        keep = self._share_to_keep(seconds, self.seconds(num_bytes))
        weight = _SIZE_OFFSET_BYTES / (num_bytes + _SIZE_OFFSET_BYTES)
        self._fit.observe((weight, weight * num_bytes), weight * seconds, keep)
        self._changed_at = now
        self.known, self._starts_anew = True, False

    def _share_to_keep(self, seconds: float, predicted: float) -> float:
        """How much of the past still counts after a load that took so long."""
        predicted = max(predicted, _MIN_SECONDS)
        if self._starts_anew:
            return 0.0
        if seconds * _SURPRISE_FACTOR < predicted:
            return _KEEP_AFTER_FAST_SURPRISE
        if seconds > predicted * _SURPRISE_FACTOR:
            return _KEEP_AFTER_SLOW_SURPRISE
        return _KEEP_PER_LOAD

    def _count(self, failed: bool) -> None:
        self._num_good = self._num_good * _KEEP_COUNTS + (not failed)
        self._num_failed = self._num_failed * _KEEP_COUNTS + failed
        self._quiet_seconds = min(2 * self._quiet_seconds, QUIET_SECONDS)
