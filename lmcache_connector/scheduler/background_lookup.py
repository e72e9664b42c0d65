"""Asks Redis which chunks it holds, off the scheduler's thread.

``get_num_new_matched_tokens`` must not wait for a network. It submits a lookup, gives it about a
millisecond, and otherwise asks again in the next step; past its deadline a lookup counts as a miss.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lmcache_connector.storage.redis.circuit_breaker import CircuitState

logger = logging.getLogger(__name__)

_MAX_TIMES = 1024
_IDLE_SECONDS = 0.25
_CLOSE_SECONDS = 1.0


class PrefixLookup(Protocol):
    """A tier that can say how many leading chunks it holds. One thread owns it."""

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """0 on any trouble."""
        ...

    def tend(self) -> None:
        """Called when there is nothing to ask: connect ahead of need."""
        ...

    def close(self) -> None: ...


class PendingLookup:
    """One question to Redis. ``deadline`` is in the clock's seconds. For one asking thread."""

    def __init__(
        self, keys: tuple[bytes, ...], deadline: float, clock: Callable[[], float]
    ) -> None:
        self.keys = keys
        self.deadline = deadline
        self._clock = clock
        self._answer = 0
        self._done = threading.Event()
        self.is_cancelled = False

    def wait(self, seconds: float) -> int | None:
        """Leading chunks that exist, 0 past the deadline, ``None`` while still open."""
        remaining = self.deadline - self._clock()
        if self._done.wait(max(0.0, min(seconds, remaining))):
            return self._answer
        if remaining > seconds:
            return None
        self.cancel()
        return 0

    @property
    def is_answered(self) -> bool:
        return self._done.is_set()

    def cancel(self) -> None:
        """It need not be asked any more. One already on its way is let be."""
        self.is_cancelled = True

    def settle(self, answer: int) -> None:
        self._answer = answer
        self._done.set()


class BackgroundLookup:
    """Runs lookups one after the other on one background thread, which ``lookup`` belongs to."""

    def __init__(
        self,
        lookup: PrefixLookup,
        deadline_seconds: float,
        clock: Callable[[], float],
        servers: Callable[[], tuple[tuple[str, CircuitState], ...]] = tuple,
    ) -> None:
        """``servers()``: the servers asked, and the states of their circuits."""
        self._lookup = lookup
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._pending: queue.SimpleQueue[PendingLookup | None] = queue.SimpleQueue()
        self.last_seconds = 0.0
        """How long the last question was on its way, answered or not."""
        self._times: deque[float] = deque(maxlen=_MAX_TIMES)
        self.servers = servers
        self._thread = threading.Thread(target=self._run, name="lmc-lookup", daemon=True)
        self._thread.start()

    def submit(self, keys: Sequence[bytes]) -> PendingLookup:
        pending = PendingLookup(tuple(keys), self._clock() + self._deadline_seconds, self._clock)
        self._pending.put(pending)
        return pending

    def take_seconds(self) -> list[float]:
        """Times of the questions that have ended since the last call."""
        return [self._times.popleft() for _ in range(len(self._times))]

    def close(self) -> None:
        """Bounded: a thread that hangs in a name look-up is left behind, a daemon."""
        self._pending.put(None)
        self._thread.join(self._deadline_seconds + _CLOSE_SECONDS)

    def _run(self) -> None:
        self._lookup.tend()
        while True:
            try:
                pending = self._pending.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                self._lookup.tend()
                continue
            if pending is None:
                self._lookup.close()
                return
            pending.settle(self._ask(pending))

    def _ask(self, pending: PendingLookup) -> int:
        asked = self._clock()
        if asked >= pending.deadline or pending.is_cancelled:
            return 0
        try:
            found = self._lookup.exists_prefix(pending.keys, pending.deadline)
        except Exception:  # the next question may fare better
            logger.exception("A look-up failed; its chunks count as misses")
            found = 0
        self.last_seconds = self._clock() - asked
        self._times.append(self.last_seconds)
        return found
