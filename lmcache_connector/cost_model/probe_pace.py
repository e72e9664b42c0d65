"""When Redis is to be measured for its own sake: while requests would use it, and nobody knows."""

from __future__ import annotations

from collections.abc import Callable

_FRESH_SECONDS = 60.0
"""After that long without news from Redis, requests that could use it have it probed."""
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 2.0, 60.0
"""Between two probes; doubles while they change nothing."""


class ProbePace:
    """``clock`` gives seconds, monotonic. ``is_wanted``: for a look that costs no call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_at = self._next_at = float("-inf")
        self._pause = _MIN_PAUSE_SECONDS
        self.is_wanted = False

    def heard(self) -> None:
        """Something was learned of Redis, by a probe or not."""
        self._heard_at = self._clock()

    def request_if_stale(self, *, is_bad: bool) -> None:
        """``is_bad``: what was heard last. It is asked again, and so is what was heard long ago."""
        if is_bad or self._clock() - self._heard_at > _FRESH_SECONDS:
            self.want()

    def want(self) -> None:
        """Whoever asks would use Redis, if it were quick."""
        self.is_wanted = True

    def restart(self) -> None:
        """A probe has changed what is known: the next ones may come soon."""
        self._pause = _MIN_PAUSE_SECONDS

    def take(self) -> bool:
        """Whether to probe now, asked once per step."""
        if not self.is_wanted:
            return False
        self.is_wanted = False
        now = self._clock()
        if now < self._next_at:
            return False
        self._next_at = now + self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
        return True
