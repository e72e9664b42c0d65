"""A clock whose time passes when a test says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """``now``: seconds."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now
