"""How long a load must wait for the stores it relies on.

Stores run one after the other, each once the forward pass that fills its blocks has ended. So the
last few tell how long the next one takes, and while one takes longer, the others do.

Times are in seconds of ``clock``. The scheduler side owns it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

_NUM_LAST = 5
"""Of these the middle one counts: a pass in which something was compiled says nothing of others."""


class StoreBacklog:
    """The stores under way, and how long one takes from when it may begin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._planned_at: dict[int, float] = {}  # in the order of planning
        self._last: deque[float] = deque(maxlen=_NUM_LAST)
        self._seconds = 0.0

    def planned(self, job_id: int) -> None:
        self._planned_at[job_id] = self._clock()

    def ended(self, job_id: int, seconds: Sequence[float]) -> None:
        """``seconds``: of each rank; none if no rank has run it."""
        del self._planned_at[job_id]
        if seconds:
            self._last.append(max(seconds))
            self._seconds = statistics.median_low(self._last)

    def wait_seconds(self, job_id: int) -> float:
        """Predicted for a load that relies on this job; 0 if it has ended."""
        planned_at = self._planned_at.get(job_id)
        if planned_at is None:
            return 0.0
        now = self._clock()
        oldest = now - next(iter(self._planned_at.values()))
        return max(0.0, max(self._seconds, oldest) - (now - planned_at))
