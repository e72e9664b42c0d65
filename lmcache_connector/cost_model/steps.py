"""How long engine steps last, and how many steps a load costs its request.

A load runs beside the steps, but vLLM checks it only between steps. With ``n`` batches in flight (2
with asynchronous scheduling, 1 without) a load goes through these stages::

    planned   with step k, when step k - n has ended; recompute would be part of step k
    reported  with the first later step k + j that is queued after the load has ended
    received  when step k + j has ended
    computed  the rest, in step k + j + n

So a request that loads begins ``n + j`` steps later than one that computes. ``j`` is at least 1,
and 1 more for each step that the load outlasts. While nothing else runs, steps are empty, and
end soon after the load: then its own time decides.

A step lasts as long as a decode step, which is measured, plus the compute of its prompt tokens.

Stores run one after the other, each after the forward pass that fills its blocks. So the last
stores predict the next one, and a slow store delays all stores behind it.

All times are in seconds. The scheduler side owns these objects.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil

_KEEP = 0.8
"""Weight of the past after each step: decode steps take longer the more requests decode."""
_MAX_SLOWNESS = 10.0
"""A slower step counts as this many times the average: one step that compiled something must not
stop all loads. A lasting slowdown shows within a few steps."""
IDLE_SECONDS = 0.001
"""Time from the end of a load to the next step while nothing else runs."""


class StepTime:
    """Measures decode steps. ``num_batches``: steps in flight at once."""

    def __init__(self, num_batches: int = 1) -> None:
        self._num_batches = num_batches
        # Planning time of each step, and whether the step computes prompts.
        self._planned: deque[tuple[float, bool]] = deque(maxlen=num_batches + 1)
        self.decode_seconds = 0.0
        """Length of a step without prompt tokens."""

    def planned(self, now: float, *, follows: bool, has_prefill: bool) -> None:
        """A step is planned. ``follows``: requests of the last step still run.

        vLLM plans a step when the oldest one in flight has ended. So once the pipeline is full, the
        time since the last plan is the length of a step.
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
        """How much later a request begins with a load of ``load_seconds`` than without one.

        ``step_seconds``: length of the coming steps; ``None`` if nothing else runs.
        """
        num_steps = 1
        if step_seconds:
            num_steps = max(1, ceil(load_seconds / step_seconds))
            load_seconds = num_steps * step_seconds
        return load_seconds + self.lost_seconds(step_seconds)

    def lost_seconds(self, step_seconds: float | None) -> float:
        """The part of :meth:`wait_seconds` that every load costs, however fast."""
        return self._num_batches * step_seconds if step_seconds else IDLE_SECONDS


_NUM_LAST = 5
"""The number of latest stores whose median counts, so that one slow forward pass does not."""


class StoreBacklog:
    """The open stores, and how long a store takes, waiting included.

    Behind four stores of 8,192 tokens at 1 GB/s, hits of as many tokens took 1.98 times as long as
    recompute if the backlog was ignored, else 1.00 (``benchmarks.gpu_storms --stores-ahead 4``).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._planned_at: dict[int, float] = {}  # in planning order
        self._last: deque[float] = deque(maxlen=_NUM_LAST)
        self._seconds = 0.0

    def __len__(self) -> int:
        return len(self._planned_at)

    def planned(self, job_id: int) -> None:
        self._planned_at[job_id] = self._clock()

    def ended(self, job_id: int, seconds: Sequence[float]) -> None:
        """``seconds``: per rank; empty if no rank has run the store."""
        del self._planned_at[job_id]
        if seconds:
            self._last.append(max(seconds))
            self._seconds = statistics.median_low(self._last)

    def wait_seconds(self, job_id: int) -> float:
        """Predicted wait of a load that depends on this store; 0 if the store has ended."""
        planned_at = self._planned_at.get(job_id)
        if planned_at is None:
            return 0.0
        now = self._clock()
        oldest = now - next(iter(self._planned_at.values()))
        return max(0.0, max(self._seconds, oldest) - (now - planned_at))
