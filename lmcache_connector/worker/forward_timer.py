"""How long forward passes take on the device that runs them.

On CPU a forward pass runs between two calls, and a clock measures it. On CUDA those calls only
queue it: two fences in the compute stream, before and after it, measure it once it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_connector.copy_kv_blocks.copier import Fence
from lmcache_connector.plans import ForwardTime, PrefillWork


@dataclass(frozen=True, slots=True)
class _Queued:
    """A forward pass that was queued on a device between two fences."""

    work: PrefillWork
    before: Fence
    after: Fence


class ForwardTimer:
    """Times forward passes. Runs on the engine's step thread; ``clock`` is in seconds.

    ``fence()`` marks a point in the device's work: see :meth:`Copier.fence`. ``has_news``: whether
    a timed pass is done, or queued; a look that costs no call.
    """

    def __init__(self, fence: Callable[[], Fence | None], clock: Callable[[], float]) -> None:
        self._fence = fence
        self._clock = clock
        self._work: PrefillWork | None = None
        self._before: Fence | None = None
        self._started = 0.0
        self._queued: deque[_Queued] = deque()
        self._done: list[ForwardTime] = []
        self.has_news = False

    def start(self, work: PrefillWork | None) -> None:
        """Call right before the forward pass; ``None``: it is not worth timing."""
        self._work = work
        if work is not None:
            self._before, self._started = self._fence(), self._clock()

    def stop(self) -> None:
        """Call right after it was run or, on CUDA, queued."""
        work, self._work = self._work, None
        if work is None:
            return
        self.has_news = True
        before, after = self._before, self._fence()
        if before is not None and after is not None:
            self._queued.append(_Queued(work, before, after))
        else:
            self._done.append(ForwardTime(work, self._clock() - self._started))

    def take(self) -> tuple[ForwardTime, ...]:
        """The passes done since the last call. Never waits."""
        while self._queued and self._queued[0].after.query():
            queued = self._queued.popleft()
            milliseconds = queued.before.elapsed_time(queued.after)
            self._done.append(ForwardTime(queued.work, milliseconds / 1000))
        done, self._done = self._done, []
        self.has_news = bool(self._queued)
        return tuple(done)
