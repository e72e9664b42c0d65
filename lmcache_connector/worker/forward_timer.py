"""How long forward passes take on the device that runs them.

On CPU a forward pass runs between two calls, and the clock tells. On CUDA those calls only queue
it: events before and behind it on the compute stream tell, once it is through.
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
    """A forward pass on its way through a CUDA device, between two events."""

    work: PrefillWork
    before: Any
    behind: Any


class ForwardTimer:
    """Times the forward passes that have work to learn from. Runs on the engine's step thread."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._on_cuda = device.type == "cuda"
        self._clock = clock
        self._work: PrefillWork | None = None
        self._started: Any = None
        self._queued: deque[_Queued] = deque()
        self._done: list[ForwardTime] = []

    def start(self, work: PrefillWork | None) -> None:
        """Right before the forward pass; ``None``: it is not worth timing."""
        self._work = work
        if work is not None:
            self._started = self._event() if self._on_cuda else self._clock()

    def stop(self) -> None:
        """Right after it was run or, on CUDA, queued."""
        work, self._work = self._work, None
        if work is None:
            return
        if self._on_cuda:
            self._queued.append(_Queued(work, self._started, self._event()))
        else:
            self._done.append(ForwardTime(work, self._clock() - self._started))

    @property
    def has_news(self) -> bool:
        """Whether a timed pass is through, or on its way."""
        return bool(self._done or self._queued)

    def take(self) -> tuple[ForwardTime, ...]:
        """Those that are through since the last call. Never waits."""
        while self._queued and self._queued[0].behind.query():
            queued = self._queued.popleft()
            milliseconds = queued.before.elapsed_time(queued.behind)
            self._done.append(ForwardTime(queued.work, milliseconds / 1000))
        done, self._done = self._done, []
        return tuple(done)

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
