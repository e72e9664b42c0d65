"""Counts that many threads add to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType


class Counters:
    """Thread-safe named counts, all starting at zero."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> Mapping[str, int]:
        """A frozen copy; absent names count zero."""
        with self._lock:
            return MappingProxyType(Counter(self._counts))
