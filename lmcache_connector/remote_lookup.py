"""Asks Redis which chunks it holds, off the scheduler's thread.

``get_num_new_matched_tokens`` must not wait for a network. It submits a lookup, gives it about a
millisecond, and otherwise asks again in the next step; past its deadline a lookup counts as a miss.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

logger = logging.getLogger(__name__)

_MAX_TIMES = 1024


class PrefixLookup(Protocol):
    """A tier that can say how many leading chunks it holds. Never raises for server trouble."""

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int: ...

    def close(self) -> None: ...


class PendingLookup:
    """One question to Redis. ``deadline`` is in the clock's seconds."""

    def __init__(self, future: Future[int], deadline: float, clock: Callable[[], float]) -> None:
        self._future = future
        self._deadline = deadline
        self._clock = clock

    def wait(self, seconds: float) -> int | None:
        """Leading chunks that exist, 0 past the deadline, ``None`` while still open."""
        remaining = self._deadline - self._clock()
        try:
            return self._future.result(timeout=max(0.0, min(seconds, remaining)))
        except FutureTimeoutError:
            if remaining > seconds:
                return None
            self.cancel()
            return 0

    def cancel(self) -> None:
        self._future.cancel()


class RemoteLookup:
    """Runs lookups one after the other on one background thread."""

    def __init__(
        self,
        lookup: PrefixLookup,
        deadline_seconds: float,
        clock: Callable[[], float],
        servers: Callable[[], tuple[tuple[str, str], ...]] = tuple,
    ) -> None:
        """``servers()``: the servers asked, and the states of their circuits."""
        self._lookup = lookup
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lmc-lookup")
        self.last_seconds = 0.0
        """How long the last question was on its way, answered or not."""
        self._times: deque[float] = deque(maxlen=_MAX_TIMES)
        self.servers = servers

    def submit(self, keys: Sequence[bytes]) -> PendingLookup:
        deadline = self._clock() + self._deadline_seconds
        future = self._pool.submit(self._ask, tuple(keys), deadline)
        return PendingLookup(future, deadline, self._clock)

    def take_seconds(self) -> list[float]:
        """Times of the questions that have ended since the last call."""
        return [self._times.popleft() for _ in range(len(self._times))]

    def close(self) -> None:
        """Bounded: a running lookup ends at its deadline."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._lookup.close()

    def _ask(self, keys: tuple[bytes, ...], deadline: float) -> int:
        asked = self._clock()
        if asked >= deadline:
            return 0
        try:
            found = self._lookup.exists_prefix(keys, deadline)
        except Exception:  # raised in the scheduler, it would take the engine down
            logger.exception("A look-up failed; its chunks count as misses")
            found = 0
        self.last_seconds = self._clock() - asked
        self._times.append(self.last_seconds)
        return found
