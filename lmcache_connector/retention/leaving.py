"""Chunks whose eviction is announced to the scheduler side before it happens.

::

    in the CPU tier -- announce --> leaving -- in a report --> told -- heard of in a plan --> may go
           ^                                      |                                            |
           '----------------- used again ---------'--------------------------------------------'

A load that the scheduler side has planned inside a step must find its chunks. It plans none of
chunks that are leaving, and a plan says which reports it was made with. So once a plan has come
that was made with a chunk's announcement, no later one loads the chunk inside a step, and those
before it have been run: plans come in the order in which they were made. A chunk that is leaving is
a hit like any other for loads beside the steps.

A chunk that is taken out of the tier before it may go, as LMCache's controller does, is a miss from
then on, but its memory is kept until it might have gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

WAIT_SECONDS = 1.0
"""For a plan to come. Without requests and stores there is none."""


class Memory(Protocol):
    """Of a chunk, free once nobody refers to it: LMCache's ``MemoryObj``."""

    def ref_count_up(self) -> None: ...

    def ref_count_down(self) -> None: ...


class LeavingChunks:
    """Of one rank. ``tell(keys)``: have the next report say where these chunks are. ``heard``: how
    many reports of leaving chunks the plans knew that have come. ``removed``: the memory of chunks
    that are in the tier no more. Thread-safe; the lock is held for as long as it takes to look at
    the keys given."""

    def __init__(self, tell: Callable[[Iterable[bytes]], None]) -> None:
        self._tell = tell
        self._heard_of = threading.Condition()
        self._numbers: dict[bytes, int] = {}  # of the report that tells it; 0: none has yet
        self.removed: dict[bytes, Any] = {}
        self._num_reports = self.heard = 0
        self._is_waited_for = True

    def __len__(self) -> int:
        return len(self._numbers)

    def announce(self, keys: Collection[bytes]) -> bool:
        """Announce the eviction of these. Returns whether all of them may be evicted now."""
        with self._heard_of:
            new = [key for key in keys if key not in self._numbers]
            self._numbers |= dict.fromkeys(new, 0)
            if new:
                self._tell(new)
            return all(0 < self._numbers[key] <= self.heard for key in keys)

    def keep(self, keys: Iterable[bytes]) -> None:
        """Take the announcement of these back: they were used, or have come again."""
        if not self._numbers:
            return
        with self._heard_of:
            kept = [key for key in keys if self._numbers.pop(key, None) is not None]
            self._free(kept)
            self._tell(kept)

    def remove(self, key: bytes, memory: Memory) -> None:
        """It is in the tier no more."""
        with self._heard_of:
            if 0 < self._numbers.get(key, 0) <= self.heard:
                del self._numbers[key]
                return
            memory.ref_count_up()
            self.removed[key] = memory
            self._numbers.setdefault(key, 0)
            self._tell((key,))

    def clear(self) -> None:
        """No plan will load any of these."""
        with self._heard_of:
            self._free(list(self.removed))
            self._numbers.clear()

    def report(self, keys: Iterable[bytes]) -> tuple[frozenset[bytes], int]:
        """Which of these are announced, for the report being made, and that report's number; 0 if
        none are. Numbers are consecutive: the next report shows that one was lost."""
        with self._heard_of:
            found = frozenset(key for key in keys if key in self._numbers)
            if not found:
                return found, 0
            self._num_reports += 1
            self._numbers |= dict.fromkeys(found, self._num_reports)
            return found, self._num_reports

    def hear(self, num_reports: int) -> None:
        """A plan has come that was made with ``num_reports`` of the reports."""
        with self._heard_of:
            self.heard = num_reports
            gone = [key for key in self.removed if 0 < self._numbers[key] <= num_reports]
            self._free(gone)
            for key in gone:
                del self._numbers[key]
            self._heard_of.notify_all()

    def await_plans(self, *, may_come: bool) -> None:
        """Whether :meth:`wait` waits: between two steps, nobody shall wait for a plan."""
        with self._heard_of:
            self._is_waited_for = may_come
            self._heard_of.notify_all()

    def wait(self, heard: int, seconds: float = WAIT_SECONDS) -> bool:
        """Until a plan has come that was made with more reports than ``heard``, or the ``seconds``
        are over. False: there was none, or nothing was announced that one could tell of."""
        with self._heard_of:
            if any(number == 0 or number > heard for number in self._numbers.values()):
                self._heard_of.wait_for(
                    lambda: self.heard > heard or not self._is_waited_for, timeout=seconds
                )
            return self.heard > heard

    def _free(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (memory := self.removed.pop(key, None)) is not None:
                memory.ref_count_down()
