"""Facts about chunks that are of use for a while."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

_T = TypeVar("_T")


class RecentKeys(Generic[_T]):
    """A bounded map of chunk keys that forgets the oldest. Thread-safe."""

    def __init__(self, max_size: int) -> None:
        self._values: dict[bytes, _T] = {}
        self._max_size = max_size
        self._lock = threading.Lock()

    def add(self, key: bytes, value: _T) -> _T:
        """Keep ``value``, unless there is one for ``key`` already. The one that is kept."""
        with self._lock:
            kept = self._values.setdefault(key, value)
            if len(self._values) > self._max_size:
                del self._values[next(iter(self._values))]
            return kept

    def pop(self, key: bytes) -> _T | None:
        with self._lock:
            return self._values.pop(key, None)

    def pop_oldest(self) -> _T | None:
        with self._lock:
            return self._values.pop(next(iter(self._values))) if self._values else None
