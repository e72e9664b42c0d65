"""Looks chunks up in Redis and peers off the scheduler's thread, and keeps each request's answers.

A lookup begins when its request arrives. ``get_num_new_matched_tokens``, which must not wait for a
network, waits about a millisecond for the answer; if there is none, vLLM asks again in the next
step. A lookup past its deadline is a miss.

If all tiers were slow in the last lookup and no request waits, a trial shows now and then whether
one is quick again, so that the next request knows whether to wait.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from lmcache_connector.cost_model.policy import MIN_LOOKUP_SECONDS
from lmcache_connector.keys.request_keys import RequestKeys
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import Tier
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.threads import Task, start_thread

if TYPE_CHECKING:
    from lmcache_connector.lookup.any_lookup import AnyLookup

logger = logging.getLogger(__name__)

_MAX_TIMES = 1024
_IDLE_SECONDS = 0.25
_CLOSE_SECONDS = 1.0
_FIRST_FOUND_SHARE = 0.5  # before any answer
_WHOLE_SHARE = 0.8  # share of the deadline that a lookup has if no other delays it
_FOUND_WEIGHT = 0.2  # weight of the last answer
_TRIAL_KEYS = 16  # enough for all nodes of a small cluster
_MAX_PAUSE_SECONDS = 60.0  # between trials


Places = Mapping[bytes, Tier]
"""The answer of a lookup: the tier of each key that was found."""
MISS: Final[Places] = MappingProxyType({})
"""No answer: no chunk counts as found."""


class PendingLookup(Task[Places]):
    """One lookup: one thread asks and waits, another settles it. ``value``: the answer once
    there, even past the deadline; ``absent``: a key that Redis has answered it does not have.
    ``deadline`` is a reading of ``clock``, in seconds."""

    def __init__(
        self, keys: tuple[bytes, ...], deadline: float, clock: Callable[[], float]
    ) -> None:
        super().__init__()
        self.keys = keys
        self.deadline = deadline
        self.absent: bytes | None = None
        self._clock = clock

    def answer(self, seconds: float) -> Places | None:
        """Wait up to ``seconds`` for the answer. Past the deadline it is a miss."""
        remaining = self.deadline - self._clock()
        self.wait(max(0.0, min(seconds, remaining)))
        if self.value is None and remaining <= seconds:
            self.cancel()
            return MISS
        return self.value


class BackgroundLookup:
    """Runs lookups one after the other on its own thread, which owns ``lookup``."""

    def __init__(
        self, lookup: AnyLookup, deadline_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._lookup = lookup
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._pending: queue.SimpleQueue[PendingLookup | None] = queue.SimpleQueue()
        self.expected_seconds: Mapping[Tier, float] = {}
        """Seconds of a lookup in each tier, by the last answer; infinite if a request's lookup that
        had its whole time was not answered since."""
        self.found_share = _FIRST_FOUND_SHARE
        """Share of chunks found by recent lookups."""
        self._times: deque[tuple[Tier, float]] = deque(maxlen=_MAX_TIMES)
        self._circuits: dict[str, CircuitState] = {}  # as reported
        self._trial_keys: tuple[bytes, ...] = ()
        self.try_soon()
        self._thread = start_thread("lmc-lookup", self._run)

    def submit(self, keys: Sequence[bytes]) -> PendingLookup:
        pending = PendingLookup(tuple(keys), self._clock() + self._deadline_seconds, self._clock)
        if self._lookup.has_servers:
            self._pending.put(pending)
        else:
            pending.settle({})
        return pending

    def try_soon(self) -> None:
        """A request has asked, or would if all tiers were not slow: the next trial comes soon."""
        self._trial_pause, self._trial_at = _IDLE_SECONDS, 0.0

    def report(self, tally: Tally) -> None:
        """Record each tier's times of ended lookups, the last 1024 at most, and changed circuits.
        Called by the thread that counts."""
        for _ in range(len(self._times)):
            tier, seconds = self._times.popleft()
            tally.observe("lookup_seconds", tier.value, value=seconds)
        before, self._circuits = self._circuits, dict(self._lookup.servers())
        if self._circuits != before:
            gone = dict.fromkeys(before, CircuitState.CLOSED)  # else their last state would remain
            for node, state in {**gone, **self._circuits}.items():
                tally.set("circuit_state", "scheduler", node, value=state.value)

    def close(self) -> None:
        """Bounded: a thread that hangs in a host name lookup is left behind, as a daemon."""
        self._pending.put(None)
        self._thread.join(self._deadline_seconds + _CLOSE_SECONDS)

    def _run(self) -> None:
        self._lookup.maintain()
        while True:
            try:
                pending = self._pending.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                self._lookup.maintain()
                self._try_if_slow()
                continue
            if pending is None:
                self._lookup.close()
                return
            pending.settle(self._ask(pending))

    def _ask(self, pending: PendingLookup) -> Places:
        if self._clock() >= pending.deadline or pending.is_cancelled:
            return MISS
        self._trial_keys = pending.keys[:_TRIAL_KEYS]
        self.try_soon()
        found = self._find(pending.keys, pending.deadline)
        self._times.extend(self._lookup.last_seconds.items())
        if found is not MISS:
            pending.absent = self._lookup.absent
            share = len(found) / max(1, len(pending.keys))
            self.found_share += _FOUND_WEIGHT * (share - self.found_share)
        return found

    def _try_if_slow(self) -> None:
        """Repeat a part of the last lookup to time it, less and less often; not if the quickest
        tier is so quick that any prompt would wait for it."""
        now, quickest = self._clock(), min(self.expected_seconds.values(), default=0.0)
        if quickest > MIN_LOOKUP_SECONDS and now >= self._trial_at:
            self._trial_at = now + self._trial_pause
            self._trial_pause = min(2 * self._trial_pause, _MAX_PAUSE_SECONDS)
            until = now + self._deadline_seconds
            self._find(self._trial_keys, until, lambda: not self._pending.empty())

    def _find(
        self, keys: Sequence[bytes], deadline: float, gives_way: Callable[[], bool] | None = None
    ) -> Places:
        found: Places
        try:
            found = self._lookup.find(keys, deadline, gives_way)
        except Exception:  # the next lookup may succeed
            logger.exception("A lookup failed; its chunks count as misses")
            found = MISS
        is_trial, took = gives_way is not None, self._lookup.last_seconds
        self.expected_seconds = {t: self._expect(t, took[t], is_trial=is_trial) for t in took}
        return found

    def _expect(self, tier: Tier, took: float, *, is_trial: bool) -> float:
        if tier in self._lookup.answered:
            return took
        before = self.expected_seconds.get(tier, 0.0)
        if is_trial:  # the next may be a minute away
            return before
        if took >= _WHOLE_SHARE * self._deadline_seconds:
            return inf
        # It was not asked, or others left it little time: it does not count as quicker.
        return max(took, before)


@dataclass(slots=True)
class RequestLookup:
    """A vLLM request, its chunk ``keys``, and the answers of lookups, written by the scheduler
    side. ``places``: the remote tier of each chunk found so far; ``offered_keys``: chunks that the
    instance named by the request offers.

    Times are readings of the hit finder's clock.
    """

    request: Any
    keys: RequestKeys
    pending: PendingLookup | None = None
    asked_at: float = 0.0
    wait_until: float | None = None  # set when the request begins to wait
    wait_seconds: float | None = None  # left for all further waits
    asked_keys: tuple[bytes, ...] = ()
    places: Places = field(default_factory=dict)
    offered_keys: frozenset[bytes] = frozenset()
    stores_until: float | None = None  # set when it begins to wait for stores of other ranks
    is_counted: bool = False

    def cancel(self) -> None:
        """No request waits for the answer any more."""
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None

    def place_of(self, key: bytes) -> Tier:
        """The remote tier that holds the chunk; Redis if none is known."""
        return Tier.PEER if key in self.offered_keys else self.places.get(key, Tier.REDIS)

    def lose(self, key: bytes) -> None:
        """A load could not read the chunk, for any reason: it is no part of a later hit."""
        self.places = {each: tier for each, tier in self.places.items() if each != key}
        self.offered_keys -= {key}

    def end_wait(self, now: float) -> None:
        """The request has its answer, or has waited long enough."""
        if self.wait_until is not None:
            self.wait_seconds = max(0.0, self.wait_until - now)
        self.pending = self.wait_until = None

    def reset(self, keys: RequestKeys) -> None:
        """Answers for the former keys are void."""
        self.cancel()
        self.keys, self.asked_keys = keys, ()
        self.places, self.offered_keys = {}, frozenset()
        self.wait_until = None
