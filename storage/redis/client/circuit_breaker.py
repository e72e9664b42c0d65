"""A circuit breaker: stop asking a failing server, and try again after a back-off.

    CLOSED --failures in a row, or silence--> OPEN --back-off over, connection made--> HALF_OPEN
    HALF_OPEN --work done--> CLOSED      HALF_OPEN --one failure--> OPEN, for twice as long

Only background threads connect, so no caller waits to learn whether a server is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum


class CircuitState(Enum):
    """The values are those of the metric ``circuit_state``."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """Opens after ``threshold`` consecutive failures, for ``min_seconds``, doubled each time up to
    ``max_seconds``, until `succeeded`. ``random`` returns numbers in [0, 1): the actual delay is
    half to all of it. ``clock`` returns seconds. Thread-safe."""

    def __init__(
        self,
        min_seconds: float,
        max_seconds: float,
        random: Callable[[], float],
        clock: Callable[[], float],
        threshold: int = 3,
    ) -> None:
        self._min, self._max = min_seconds, max_seconds
        self._random = random
        self._clock = clock
        self._threshold = threshold
        self._lock = threading.Lock()
        self._state = CircuitState.CLOSED
        self._failures = 0
        self._num_delays = 0
        self._retry_at = 0.0

    @property
    def state(self) -> CircuitState:
        return self._state

    def may_connect(self) -> bool:
        """Whether to connect now: if open, once per back-off delay."""
        with self._lock:
            if self._state is not CircuitState.OPEN:
                return True
            if self._clock() < self._retry_at:
                return False
            self._begin_delay()
            return True

    def seconds_until_retry(self) -> float | None:
        """Seconds until the next try; None while not open."""
        with self._lock:
            if self._state is not CircuitState.OPEN:
                return None
            return max(0.0, self._retry_at - self._clock())

    def connected(self) -> bool:
        """A connection was made and answered. True if the breaker was open."""
        with self._lock:
            was_open = self._state is CircuitState.OPEN
            if was_open:
                self._state = CircuitState.HALF_OPEN
            return was_open

    def undecided(self) -> None:
        """The try that :meth:`may_connect` has allowed showed nothing: the next need not wait."""
        with self._lock:
            if self._state is CircuitState.OPEN:
                self._num_delays = max(0, self._num_delays - 1)
                self._retry_at = self._clock()

    def succeeded(self) -> None:
        """Work was done over the connection: the breaker closes."""
        with self._lock:
            self._state = CircuitState.CLOSED
            self._failures = self._num_delays = 0

    def failed(self, *, at_once: bool = False) -> bool:
        """Count a failure; ``at_once`` opens the breaker. True if it opened now, to be logged."""
        with self._lock:
            self._failures += 1
            if self._state is CircuitState.OPEN:
                return False
            is_half_open = self._state is CircuitState.HALF_OPEN
            if not (at_once or is_half_open or self._failures >= self._threshold):
                return False
            self._state = CircuitState.OPEN
            self._begin_delay()
            return True

    def _begin_delay(self) -> None:
        delay = min(self._max, self._min * 2.0 ** min(self._num_delays, 32))
        self._num_delays += 1
        self._retry_at = self._clock() + delay * (0.5 + 0.5 * self._random())
