"""How fast one tier answers: latency and bandwidth, fitted to the loads seen lately.

A load of ``x`` bytes is taken to last ``latency + x / bandwidth`` seconds. Both are fitted by
weighted least squares over decayed sums, so an observation costs a few additions and no history is
kept. Squared errors are divided by ``(x + 8 MiB)^2``: errors count about relative to the time, and
a big load does not drown what small ones say about latency.

Not thread-safe; the scheduler side owns it. Times come in as arguments, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_KEEP_PER_LOAD = 0.75
"""Weight older loads keep after one more: the last four or so decide. A tier's speed depends on
its neighbours and changes within seconds; old measurements are worth little."""
_KEEP_AFTER_SLOW_SURPRISE = 0.2
"""A load twice as slow as predicted: the tier has probably changed, possibly only hiccupped."""
_KEEP_AFTER_FAST_SURPRISE = 0.02
"""A load twice as fast as predicted: nothing is fast by accident, so the past is out of date. Not
zero: two sizes are needed to tell latency from bandwidth."""
_SURPRISE_FACTOR = 2.0
_HALF_LIFE_SECONDS = 600.0
QUIET_SECONDS = 60.0
"""What was learned counts for no longer against a tier that is not loaded from."""
_FIRST_QUIET_SECONDS = 1.0
"""Without a calibration, what the first loads show may as well be a hiccup: it counts for so long,
doubled with each load and each return to nothing, up to a minute."""
_SIZE_OFFSET_BYTES = 8 << 20
_KEEP_PROVEN = 0.9
_CALIBRATED_BYTES = 1 << 30
"""A calibration is taken at its word up to loads of this size."""
_ANCHOR_SHARE = 0.005
"""Weight of the calibrated latency in the fit. It decides when all loads had one size, where
nothing else tells latency from bandwidth, and yields to any two sizes."""
_STALL_FACTOR = 3.0
"""A load cut off after this many times what its bytes should have taken counts as stalled."""
_KEEP_COUNTS = 0.9
"""Slower than speeds fade: a tier that stalls now and then looks well in between."""
_PRIOR_LOADS = 5.0
_PRIOR_FAILURE_RATE = 0.02
_FIRST_SPREAD = 0.15
_MIN_SPREAD, _MAX_SPREAD = 0.1, 1.0
_MIN_SECONDS = 1e-6  # a coarse clock may show nothing at all


@dataclass(slots=True)
class _Sums:
    """Decayed sums of weight, bytes, seconds and their products."""

    w: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def keep(self, share: float) -> None:
        self.w *= share
        self.x *= share
        self.y *= share
        self.xx *= share
        self.xy *= share

    def add(self, num_bytes: float, seconds: float) -> None:
        weight = (num_bytes + _SIZE_OFFSET_BYTES) ** -2
        self.w += weight
        self.x += weight * num_bytes
        self.y += weight * seconds
        self.xx += weight * num_bytes * num_bytes
        self.xy += weight * num_bytes * seconds


@dataclass(slots=True)
class TierSpeed:
    """What is known of one tier.

    ``known`` is false until a load or a calibration told something; ``stalled`` is true from a load
    that hung or broke until the next one that arrived; ``on_trial`` is true from a return to the
    calibration until the next load. Where a tier is not ``probed``, nothing but a load can tell
    that a stall is over: it ends by itself, as what was learned does.
    """

    probed: bool = True
    latency_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    spread: float = _FIRST_SPREAD
    """Decayed mean of the prediction's relative error, from 0.1 to 1."""
    known: bool = False
    stalled: bool = False
    on_trial: bool = False
    proven_bytes: float = float("inf")
    """The largest load the estimate rests on, fading as smaller ones follow."""
    _sums: _Sums = field(default_factory=_Sums)
    _calibration: tuple[float, float] | None = None
    """Bytes per second, and seconds of latency."""
    _num_good: float = 0.0
    _num_failed: float = 0.0
    _changed_at: float = 0.0
    _quiet_seconds: float = _FIRST_QUIET_SECONDS

    def seconds(self, num_bytes: float) -> float:
        """Predicted seconds of one load of that size from an idle tier; 0 when nothing is known."""
        return self.latency_seconds + num_bytes * self.seconds_per_byte

    def seconds_at_worst(self, num_bytes: float) -> float:
        """The same, for a bet: loads larger than any seen are taken to last in proportion.

        With noise, small loads say little about the slope, and a large one would pay for it.
        """
        if num_bytes <= self.proven_bytes:
            return self.seconds(num_bytes)
        return self.seconds(self.proven_bytes) * (num_bytes / self.proven_bytes)

    @property
    def bytes_per_second(self) -> float:
        """Infinite when nothing is known."""
        return 1.0 / self.seconds_per_byte if self.seconds_per_byte else float("inf")

    @property
    def failure_rate(self) -> float:
        """Decayed share of loads that stalled or broke; 2 % with nothing seen."""
        failed = self._num_failed + _PRIOR_LOADS * _PRIOR_FAILURE_RATE
        return failed / (self._num_failed + self._num_good + _PRIOR_LOADS)

    def calibrate(self, now: float, bytes_per_second: float, latency_seconds: float) -> None:
        """Start again from a measurement. It counts as a load that arrived, but the one that ends a
        stall does not: a tier may bring what is measured, and stall with every load after it.

        Raises ``ValueError`` for what cannot be a measurement.
        """
        if bytes_per_second <= 0 or latency_seconds < 0:
            raise ValueError("a calibration needs a positive bandwidth and no negative latency")
        self._sums = _Sums()
        self._calibration = bytes_per_second, latency_seconds
        self._quiet_seconds = QUIET_SECONDS
        for num_bytes in (1 << 20, _CALIBRATED_BYTES):
            self._sums.add(num_bytes, latency_seconds + num_bytes / bytes_per_second)
        self._changed_at = now
        self.proven_bytes = float(_CALIBRATED_BYTES)
        if not self.stalled:
            self._count(failed=False)
        self.known, self.stalled, self.on_trial = True, False, False
        self._fit()

    def is_outdated(self, now: float) -> bool:
        """Whether nothing was observed for a minute, or for some seconds where little was before,
        and nothing calibrated. The stall of a probed tier does not end by itself."""
        is_kept = self.stalled and self.probed
        return not is_kept and now - self._changed_at >= self._quiet_seconds

    def calibrated_only(self, now: float) -> TierSpeed:
        """A tier whose speed is known from the calibration alone, if there was one. It has failed
        as often as this one: a minute in which nothing was loaded is no reason to trust it."""
        fresh = TierSpeed(self.probed, _changed_at=now)
        if self._calibration is not None:
            fresh.calibrate(now, *self._calibration)
        fresh._num_good, fresh._num_failed = self._num_good, self._num_failed
        fresh._quiet_seconds = min(2 * self._quiet_seconds, QUIET_SECONDS)
        return fresh

    def arrived(self, now: float, num_bytes: int, seconds: float) -> None:
        """A load that brought all its bytes. Raises ``ValueError`` for an impossible one."""
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
        if num_bytes <= 0 or seconds < 0:
            raise ValueError(f"no load moves {num_bytes} bytes in {seconds} seconds")
        seconds = max(seconds, _MIN_SECONDS)
        keep = self._share_to_keep(seconds, self.seconds(num_bytes))
        self._sums.keep(keep)
        past_bytes = _KEEP_PROVEN * self.proven_bytes if keep == _KEEP_PER_LOAD else 0.0
        self.proven_bytes = max(past_bytes, float(num_bytes))
        self._sums.keep(0.5 ** (max(0.0, now - self._changed_at) / _HALF_LIFE_SECONDS))
        self._sums.add(num_bytes, seconds)
        self._changed_at = now
        self.known, self.on_trial = True, False
        self._fit()

    def _share_to_keep(self, seconds: float, predicted: float) -> float:
        """Judges the prediction by what came, and says how much of the past still counts."""
        if not self.known:
            return 0.0
        predicted = max(predicted, _MIN_SECONDS)
        error = min(abs(seconds - predicted) / predicted, _MAX_SPREAD)
        self.spread += (1 - _KEEP_PER_LOAD) * (error - self.spread)
        self.spread = max(self.spread, _MIN_SPREAD)
        if seconds * _SURPRISE_FACTOR < predicted:
            return _KEEP_AFTER_FAST_SURPRISE
        if seconds > predicted * _SURPRISE_FACTOR:
            return 0.0 if self.on_trial else _KEEP_AFTER_SLOW_SURPRISE
        return _KEEP_PER_LOAD

    def _count(self, failed: bool) -> None:
        self._num_good = self._num_good * _KEEP_COUNTS + (not failed)
        self._num_failed = self._num_failed * _KEEP_COUNTS + failed
        self._quiet_seconds = min(2 * self._quiet_seconds, QUIET_SECONDS)

    def _fit(self) -> None:
        """Least squares for (latency, seconds per byte), neither of them negative."""
        s = self._sums
        w, y = s.w, s.y
        if self._calibration is not None:
            _, latency_seconds = self._calibration
            w += _ANCHOR_SHARE * s.w
            y += _ANCHOR_SHARE * s.w * latency_seconds
        # The share of the byte sums' variance: with one size only it is rounding noise.
        variance = w * s.xx - s.x * s.x
        if variance > 1e-4 * w * s.xx:
            slope = (w * s.xy - s.x * y) / variance
            latency = (y - slope * s.x) / w
        else:
            slope, latency = s.xy / s.xx, 0.0
        if slope < 0:
            slope, latency = 0.0, y / w
        elif latency < 0:
            slope, latency = s.xy / s.xx, 0.0
        self.latency_seconds, self.seconds_per_byte = latency, slope
