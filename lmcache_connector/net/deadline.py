"""How long an operation may still take: until a point in time, or until it is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def never() -> bool:
    """The ``cancelled`` of an operation that nobody cancels."""
    return False


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at`` is a reading of ``clock``, in seconds. ``cancelled`` may end it earlier."""

    at: float
    clock: Callable[[], float]
    cancelled: Callable[[], bool] = never

    def remaining(self) -> float:
        """Seconds left; 0.0 if it has passed or was cancelled."""
        return 0.0 if self.cancelled() else max(0.0, self.at - self.clock())
