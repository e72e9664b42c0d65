"""How long something may still take: a point in time and a way to be called off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at`` is a reading of ``clock`` (seconds); ``cancelled`` ends it early."""

    at: float
    clock: Callable[[], float]
    cancelled: Callable[[], bool] = never

    def remaining(self) -> float:
        """Seconds left, 0.0 when over or cancelled."""
        return 0.0 if self.cancelled() else max(0.0, self.at - self.clock())
