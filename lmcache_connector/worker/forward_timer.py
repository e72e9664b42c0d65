"""How long forward passes take on the device that runs them.

On CPU a forward pass runs between two calls, and a clock measures it. On CUDA those calls only
queue it: two events on the compute stream, before and after it, measure it once it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_connector.plans import ForwardTime, PrefillWork


@dataclass(frozen=True, slots=True)
class _Queued:
    """A forward pass that was queued on a CUDA device between two events."""

    work: PrefillWork
    before: Any
    after: Any


class ForwardTimer:
    """Times forward passes. Runs on the engine's step thread; ``clock`` is in seconds."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._on_cuda = device.type == "cuda"
        self._clock = clock
        self._work: PrefillWork | None = None
        self._started: Any = None
        self._queued: deque[_Queued] = deque()
        self._done: list[ForwardTime] = []

    def start(self, work: PrefillWork | None) -> None:
        """Call right before the forward pass; ``None``: it is not worth timing."""
        self._work = work
        if work is not None:
            self._started = self._event() if self._on_cuda else self._clock()

    def stop(self) -> None:
        """Call right after it was run or, on CUDA, queued."""
        work, self._work = self._work, None
        if work is None:
            return
        if self._on_cuda:
            self._queued.append(_Queued(work, self._started, self._event()))
        else:
            self._done.append(ForwardTime(work, self._clock() - self._started))

    @property
    def has_news(self) -> bool:
        """Whether a timed pass is done, or queued."""
        return bool(self._done or self._queued)

    def take(self) -> tuple[ForwardTime, ...]:
        """The passes done since the last call. Never waits."""
        while self._queued and self._queued[0].after.query():
            queued = self._queued.popleft()
            milliseconds = queued.before.elapsed_time(queued.after)
            self._done.append(ForwardTime(queued.work, milliseconds / 1000))
        done, self._done = self._done, []
        return tuple(done)

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
