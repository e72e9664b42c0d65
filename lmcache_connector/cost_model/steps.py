"""How long engine steps last, and what it costs a request to wait for some of them.

A load runs beside the steps, but vLLM looks at it only between them. With ``n`` batches under way
(2 with asynchronous scheduling, 1 without) it takes this course::

    planned   with step k, when step k - n has ended; recompute would be part of step k
    reported  with the first later step k + j that is queued after the load has ended
    heard of  when step k + j has ended
    computed  the rest, in step k + j + n

So a request that loads begins ``n + j`` steps later than one that computes. ``j`` is at least 1,
and 1 more for each step the load outlasts. While nothing else runs, steps are empty and last a
millisecond or so: then the load decides.

A step that computes prompts lasts as long as their compute; every step lasts as long as a decode
step, which is measured.

Stores run one after the other, each once the forward pass that fills its blocks has ended. So the
last few tell how long the next one takes, and while one takes longer, the others do.

All times are in seconds. The scheduler side owns these objects.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil

_KEEP = 0.8
"""Of what was measured, with each step: a decode step's length follows how many requests decode."""
_MAX_SLOWNESS = 10.0
"""A step slower than this many times the last ones counts as that slow: one that compiled something
is no reason to load nothing beside the next ones. A lasting slowdown gets through in a few."""
IDLE_SECONDS = 0.001
"""From the end of a load to the next step, while nothing else runs."""


class StepTime:
    """``num_batches``: under way at once."""

    def __init__(self, num_batches: int = 1) -> None:
        self._num_batches = num_batches
        # Of each step when it was planned, and whether it computes prompts.
        self._planned: deque[tuple[float, bool]] = deque(maxlen=num_batches + 1)
        self.decode_seconds = 0.0
        """Of a step that computes no prompts."""

    def planned(self, now: float, *, follows: bool, has_prefill: bool) -> None:
        """A step is planned. ``follows``: on one whose requests run still.

        That happens when the oldest step under way has ended: the time since the last plan is what
        that step took, once the first few have filled the pipeline.
        """
        if not follows:
            self._planned.clear()
        if len(self._planned) > self._num_batches:
            (_, computed_prompts), (last, _) = self._planned[1], self._planned[-1]
            if not computed_prompts:
                seconds, before = now - last, self.decode_seconds
                if before:
                    seconds = _KEEP * before + (1 - _KEEP) * min(seconds, _MAX_SLOWNESS * before)
                self.decode_seconds = seconds
        self._planned.append((now, has_prefill))

    def wait_seconds(self, load_seconds: float, step_seconds: float | None) -> float:
        """How much later a request begins that loads so long, than one that computes.

        ``step_seconds``: of the steps to come; ``None`` if nothing else runs.
        """
        num_steps = 1
        if step_seconds:
            num_steps = max(1, ceil(load_seconds / step_seconds))
            load_seconds = num_steps * step_seconds
        return load_seconds + self.lost_seconds(step_seconds)

    def lost_seconds(self, step_seconds: float | None) -> float:
        """Of such a wait, what no load avoids, however quick it is."""
        return self._num_batches * step_seconds if step_seconds else IDLE_SECONDS


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
