"""Schedules offers of chunks that memory holds and Redis may lack.

A write can fail or never be tried: another writer claimed the chunk and died, the server was away
or full, the queue was full. A written value can vanish: the server restarted, a purge, expiry.
While memory holds a chunk, no request would write it again. So chunks that requests use (`want`)
are offered now and then, and failed writes (`ended`) are retried. An offer is a normal write: if
the value exists, it costs one query, and renews the lifetime if so configured. While writes fail,
a chunk is offered less and less often, and never given up.

Offers have a bounded rate and come after new writes. The store lane makes them between jobs.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_connector.bounded import Latest

_MAX_TRACKED = 1 << 16
_MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds for which a value counts as present once found or written, and seconds until a failed
    write is retried, doubled each time up to a limit, which is lower for chunks that requests
    use."""

    granted_seconds: float = 30.0
    retry_seconds: float = 6.0
    max_retry_seconds: float = 60.0
    max_unused_retry_seconds: float = 600.0

    @classmethod
    def for_lifetime(cls, ttl_seconds: float | None) -> Pace:
        """For values with this lifetime: offered again well before it ends."""
        if ttl_seconds is None:
            return cls()
        return cls(granted_seconds=min(cls().granted_seconds, ttl_seconds / 3))


class _State(NamedTuple):
    """When a chunk may be offered next, its failures in a row, and whether it will be offered."""

    at: float
    failures: int
    is_due: bool


class Offers:
    """Decides when to offer which chunk (pure), for the last 65,536 chunks wanted or failed. Not
    thread-safe; times are readings of one clock."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._states: Latest[bytes, _State] = Latest(_MAX_TRACKED)
        self._due: list[tuple[float, bytes]] = []

    def want(self, key: bytes, now: float) -> None:
        """A request uses the chunk."""
        state, soon = self._states.get(key), now + self._pace.max_retry_seconds
        if state is None or not (state.is_due or state.at > now):
            self._put(key, _State(now, 0, is_due=True))
        elif state.is_due and state.at > soon:
            self._put(key, _State(soon, state.failures, is_due=True))
        # else scheduled already, recently written, or being written

    def ended(self, key: bytes, stored: bool, now: float) -> None:
        """A write of the chunk has ended, whoever asked for it."""
        if stored:
            self._put(key, _State(now + self._pace.granted_seconds, 0, is_due=False))
            return
        state = self._states.get(key)
        failures = state.failures if state is not None else 0
        seconds = self._pace.retry_seconds * 2 ** min(failures, _MAX_DOUBLINGS)
        at = now + min(seconds, self._pace.max_unused_retry_seconds)
        self._put(key, _State(at, failures + 1, is_due=True))

    def requeue(self, key: bytes, now: float) -> None:
        """The queue is full: offer the chunk after all due ones."""
        state = self._states.get(key)
        if state is not None and not state.is_due:
            self._put(key, _State(now, state.failures, is_due=True))

    def forget(self, key: bytes) -> None:
        """Offer the chunk no more until it is wanted or written again."""
        self._states.pop(key, None)

    def take(self, now: float, limit: int) -> list[bytes]:
        """Up to ``limit`` chunks to offer now. Each ends with `ended` or `forget`."""
        taken: list[bytes] = []
        while self._due and len(taken) < limit and self._due[0][0] <= now:
            at, key = heapq.heappop(self._due)
            if self._is_current(at, key):  # else written or forgotten meanwhile
                under_way = now + self._pace.max_retry_seconds
                self._states[key] = _State(under_way, self._states[key].failures, is_due=False)
                taken.append(key)
        return taken

    def _put(self, key: bytes, state: _State) -> None:
        self._states[key] = state
        if state.is_due:
            heapq.heappush(self._due, (state.at, key))
            if len(self._due) > 2 * _MAX_TRACKED:
                self._due = [due for due in self._due if self._is_current(*due)]
                heapq.heapify(self._due)

    def _is_current(self, at: float, key: bytes) -> bool:
        state = self._states.get(key)
        return state is not None and state.is_due and state.at == at
