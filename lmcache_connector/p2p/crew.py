"""A few threads for work that may have to wait for the network, however much of it is asked for."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 5.0


class Crew:
    """At most ``max_threads``, which end when there is nothing to do, and as much work waiting as
    ``max_waiting``. Thread-safe."""

    def __init__(self, name: str, max_threads: int, max_waiting: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._num_threads = self._num_idle = 0
        self._stopping = False

    def submit(self, work: Callable[[], None]) -> bool:
        """Whether it will be done: there may be too much already."""
        with self._changed:
            if self._stopping or len(self._work) >= self._max_waiting:
                return False
            needs_thread = self._num_idle <= len(self._work)
            if needs_thread and self._num_threads < self._max_threads and not self._start():
                return False
            self._work.append(work)
            self._changed.notify()
            return True

    def close(self) -> None:
        """Begin nothing more. What is being done is not waited for."""
        with self._changed:
            self._stopping = True
            self._work.clear()
            self._changed.notify_all()

    def _start(self) -> bool:
        """Whether there is somebody to do the work."""
        try:
            start_thread(self._name, self._serve)
        except RuntimeError as error:
            logger.warning("No thread %s: %s", self._name, error)
            return self._num_threads > 0
        self._num_threads += 1
        return True

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:  # it costs this piece of work
                logger.exception("Work of %s failed", self._name)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._work or self._stopping, _IDLE_SECONDS)
            self._num_idle -= 1
            if self._work:
                return self._work.popleft()
            self._num_threads -= 1
            return None
