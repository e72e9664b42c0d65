"""A clock whose time passes when a test says so, and bounded waits by the real one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Clock:
    """``now``: seconds."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


_PAUSE_SECONDS = 0.02


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Ask again and again; whether it holds before that time is over."""
    until = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)
    return held


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Raises ``TimeoutError(what)`` if it does not come to that."""
    if not within(seconds, holds):
        raise TimeoutError(what)
