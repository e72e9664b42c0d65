"""When chunks that memory holds and Redis lacks are offered to Redis again.

A write can fail, or never be tried: another writer claimed the chunk and died, the server was away
or full, the queue had no room. What was written can go: the server restarted, somebody purged it,
it expired. As long as memory holds a chunk, no request would write it again. So what requests want
(`want`) is offered once in a while, and what was not written (`ended`) again later. An offer is a
write like any other: where the value exists, it costs a question, and renews its lifetime if that
is configured. A chunk that cannot be written several times in a row is forgotten until a request
wants it again.

The rate is bounded, fresh writes go first, and the store lane does it, between its jobs.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_connector.bounded import Latest

_MAX_TRACKED = 1 << 16
_MAX_FAILURES = 6
"""In a row, three and a half minutes with the usual pace."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: how long what was found or written is taken for granted, and how long after a failed
    write the next one is tried, doubled each time up to a limit."""

    granted_seconds: float = 30.0
    retry_seconds: float = 6.0
    max_retry_seconds: float = 60.0

    @classmethod
    def for_lifetime(cls, ttl_seconds: float | None) -> Pace:
        """For values that live for ``ttl_seconds``: they are looked after well before they end."""
        if ttl_seconds is None:
            return cls()
        return cls(granted_seconds=min(cls().granted_seconds, ttl_seconds / 3))


class _State(NamedTuple):
    """When a chunk may be offered next, how often it has failed in a row, and whether it waits to
    be offered then."""

    at: float
    failures: int
    is_due: bool


class Offers:
    """When which chunk is to be offered (pure). Not thread-safe; times are readings of one clock.

    Chunks wanted or failed last are remembered, 65,536 of them.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._states: Latest[bytes, _State] = Latest(_MAX_TRACKED)
        self._due: list[tuple[float, bytes]] = []

    def want(self, key: bytes, now: float) -> None:
        """A request wants the chunk."""
        state = self._states.get(key)
        if state is not None and (state.is_due or state.at > now):
            return  # it keeps its place, or was settled a moment ago, or is under way
        self._put(key, _State(now, 0, is_due=True))

    def ended(self, key: bytes, stored: bool, now: float) -> None:
        """A write of the chunk has ended, whoever asked for it."""
        if stored:
            self._put(key, _State(now + self._pace.granted_seconds, 0, is_due=False))
            return
        state = self._states.get(key)
        failures = 1 + (state.failures if state is not None else 0)
        if failures > _MAX_FAILURES:
            self.forget(key)
            return
        seconds = min(self._pace.max_retry_seconds, self._pace.retry_seconds * 2 ** (failures - 1))
        self._put(key, _State(now + seconds, failures, is_due=True))

    def put_off(self, key: bytes, now: float) -> None:
        """No room for it: it comes behind all that are due, and before what is wanted later."""
        state = self._states.get(key)
        if state is not None and not state.is_due:
            self._put(key, _State(now, state.failures, is_due=True))

    def forget(self, key: bytes) -> None:
        """Offer it no more, until it is wanted or written again."""
        self._states.pop(key, None)

    def take(self, now: float, limit: int) -> list[bytes]:
        """The chunks to be offered now, at most so many. Each ends with `ended` or `forget`."""
        taken: list[bytes] = []
        while self._due and len(taken) < limit and self._due[0][0] <= now:
            at, key = heapq.heappop(self._due)
            if self._is_current(at, key):  # else it was settled meanwhile, or forgotten
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
