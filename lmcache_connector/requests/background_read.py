"""Reads that take too long for the thread that needs them, one after the other on a thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")
_CLOSE_SECONDS = 1.0


class Reading(Generic[ValueT]):
    """What becomes of one read. ``value`` is ``None`` until it is done, and if it failed."""

    def __init__(self) -> None:
        self.value: ValueT | None = None
        self.is_cancelled = False
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it was done within so many seconds."""
        return self._done.wait(seconds)

    def cancel(self) -> None:
        """It need not be made any more. One under way goes on."""
        self.is_cancelled = True

    def settle(self, value: ValueT | None) -> None:
        self.value = value
        self._done.set()


class BackgroundReads:
    """Makes reads in the order they were asked for, on one thread of that name.

    The thread starts with the first read.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(
        self, read: Callable[[], ValueT | None], then: Callable[[], None] = lambda: None
    ) -> Reading[ValueT]:
        """``read()`` may raise anything: it is logged, and the value is ``None``. ``then()`` is
        called on the thread once the reading is done."""
        if self._thread is None:
            self._thread = start_thread(self._name, self._run)
        reading: Reading[ValueT] = Reading()

        def make() -> None:
            value: ValueT | None = None
            try:
                if not reading.is_cancelled:
                    value = read()
            except Exception:  # whoever asked goes without, and the next read may fare better
                logger.exception("Reading in the background failed")
            reading.settle(value)
            then()

        self._reads.put(make)
        return reading

    def close(self) -> None:
        """Bounded: a thread that hangs in a file system is left behind, a daemon."""
        if self._thread is not None:
            self._reads.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (make := self._reads.get()) is not None:
            make()
