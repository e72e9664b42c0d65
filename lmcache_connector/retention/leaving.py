"""Announces evictions of chunks to the scheduler side before they happen.

::

    in the CPU tier -- announce --> leaving -- in a report --> told -- heard of in a plan --> may go
           ^                                      |                                            |
           '----------------- used again ---------'--------------------------------------------'

A load inside a step must find its chunks. So the scheduler side plans no such load of a leaving
chunk, and each plan says which reports it knew. Plans arrive in order: once a plan has arrived that
knew of a chunk's announcement, all earlier plans have run, and no later one loads the chunk inside
a step. For loads beside the steps, a leaving chunk is a hit like any other.

If LMCache's controller removes a chunk from the tier before it may go, the chunk is a miss from
then on, but its memory is kept until it may go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

WAIT_SECONDS = 1.0
"""How long to wait for a plan. Without requests and stores, none comes."""


class LeavingChunks:
    """One rank's leaving chunks. ``tell(keys)``: the next report says which of them are in the tier
    or leaving. ``acked``: the last report of leaving chunks known to a plan that has arrived.
    ``removed``: memory of chunks no longer in the tier. Thread-safe; locks are held for O(keys)."""

    def __init__(self, tell: Callable[[Iterable[bytes]], None]) -> None:
        self._tell = tell
        self._plan_came = threading.Condition()
        self._numbers: dict[bytes, int] = {}  # number of the announcing report; 0: not reported yet
        self.removed: dict[bytes, Any] = {}
        self._num_reports = self.acked = 0
        self._plans_may_come = True

    def __len__(self) -> int:
        return len(self._numbers)

    def announce(self, keys: Collection[bytes]) -> bool:
        """Announce evictions. Returns whether all ``keys`` may be evicted now."""
        with self._plan_came:
            new = [key for key in keys if key not in self._numbers]
            self._numbers |= dict.fromkeys(new, 0)
            if new:
                self._tell(new)
            return all(0 < self._numbers[key] <= self.acked for key in keys)

    def keep(self, keys: Iterable[bytes]) -> None:
        """Withdraw announcements: the chunks were used or stored again."""
        if not self._numbers:
            return
        with self._plan_came:
            kept = [key for key in keys if self._numbers.pop(key, None) is not None]
            self._free(kept)
            self._tell(kept)

    def remove(self, key: bytes, memory: Any) -> None:
        """The chunk left the tier. Its ``memory``, a ``MemoryObj``, is kept until it may go."""
        with self._plan_came:
            if 0 < self._numbers.get(key, 0) <= self.acked:
                del self._numbers[key]
                return
            memory.ref_count_up()
            self.removed[key] = memory
            self._numbers.setdefault(key, 0)
            self._tell((key,))

    def clear(self) -> None:
        """Forget everything: no plan will load these chunks."""
        with self._plan_came:
            self._free(list(self.removed))
            self._numbers.clear()

    def report(self, keys: Iterable[bytes]) -> tuple[frozenset[bytes], int]:
        """For the report being made: the announced ones among ``keys``, and the report's number, 0
        without any. Numbers are consecutive, so that a lost report shows."""
        with self._plan_came:
            found = frozenset(key for key in keys if key in self._numbers)
            if not found:
                return found, 0
            self._num_reports += 1
            self._numbers |= dict.fromkeys(found, self._num_reports)
            return found, self._num_reports

    def note_acked(self, num_reports: int) -> None:
        """A plan has arrived that was made with ``num_reports`` of the reports."""
        with self._plan_came:
            self.acked = num_reports
            gone = [key for key in self.removed if 0 < self._numbers[key] <= num_reports]
            self._free(gone)
            for key in gone:
                del self._numbers[key]
            self._plan_came.notify_all()

    def await_plans(self, *, may_come: bool) -> None:
        """Whether :meth:`wait` waits: between two steps no plan can come."""
        with self._plan_came:
            self._plans_may_come = may_come
            self._plan_came.notify_all()

    def wait(self, acked: int, seconds: float = WAIT_SECONDS) -> bool:
        """Wait until a plan arrives that knew more reports than ``acked``, up to ``seconds``. False
        if none did. Does not wait if no announcement is pending or no plan can come."""
        with self._plan_came:
            if any(number == 0 or number > acked for number in self._numbers.values()):
                self._plan_came.wait_for(
                    lambda: self.acked > acked or not self._plans_may_come, timeout=seconds
                )
            return self.acked > acked

    def _free(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (memory := self.removed.pop(key, None)) is not None:
                memory.ref_count_down()
