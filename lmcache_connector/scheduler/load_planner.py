"""How much of a request can be loaded, and how much of that shall be.

The index of the CPU tiers answers at once, Redis in its own time; :class:`LoadPolicy` then says
which part of the hit is quicker to load than to compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lmcache_connector.cost_model.load_policy import LoadPolicy
from lmcache_connector.scheduler.background_lookup import BackgroundLookup
from lmcache_connector.scheduler.chunk_index import ChunkIndex
from lmcache_connector.scheduler.counters import SchedulerCounters
from lmcache_connector.scheduler.kv_events import KvEventLog
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings

logger = logging.getLogger(__name__)

# For an answer from Redis while nothing runs: an idle step would take no less.
_IDLE_WAIT_SECONDS = 0.005
# An answer that old is asked for again before a request is scheduled: it has queued, while others
# stored what it shares with them and the CPU tier let go of what it had.
_STALE_SECONDS = 0.25


class LoadPlanner:
    """Without ``lookup`` only the index is asked; without ``choice`` every hit is loaded."""

    def __init__(
        self,
        settings: SchedulerSettings,
        index: ChunkIndex,
        lookup: BackgroundLookup | None,
        choice: LoadPolicy | None,
        kv_events: KvEventLog | None,
        counters: SchedulerCounters,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._index = index
        self.lookup = lookup
        self._choice = choice
        self._kv_events = kv_events
        self._counters = counters
        self._clock = clock
        self._may_wait = True

    def next_step(self) -> None:
        """A new engine step may wait for Redis again, once."""
        self._may_wait = True

    def ask_redis(self, state: RequestState, first: int) -> None:
        """Ask for the chunks from ``first`` on that are not in the index: once, and again for a
        request that has queued for long."""
        if self.lookup is None or (state.lookup_chunks and not self._is_stale(state)):
            return
        keys = state.keys.keys
        found = self._index.has_each(keys[first:])
        missing = tuple(i for i, in_cpu in enumerate(found, first) if not in_cpu)
        if missing:
            state.lookup_chunks = missing
            state.lookup = self.lookup.submit([keys[i] for i in missing])
            state.asked_at = self._clock()
            self._counters.redis_lookups += 1

    def _is_stale(self, state: RequestState) -> bool:
        """Whether a new answer may say more: the old one is old, and not all was there."""
        pending = state.lookup
        if pending is None or self._clock() - state.asked_at < _STALE_SECONDS:
            return False
        return pending.is_answered and pending.wait(0.0) != len(state.lookup_chunks)

    def redis_answered(
        self, state: RequestState, num_computed_tokens: int, *, is_idle: bool
    ) -> bool:
        """Waits a moment if that is worth it, longer where it holds up nobody (``is_idle``: no
        request runs). False: to be asked again."""
        if state.lookup is None:
            return True
        patience = self._lookup_patience(state, num_computed_tokens)
        found = state.lookup.wait(min(self._wait_seconds(is_idle), max(0.0, patience)))
        if found is None and patience > 0:
            self._may_wait = False  # a slow server costs a step one wait, however many requests
            return False
        if found is None:
            # Not cancelled: how long it takes tells whether the next one is worth waiting for.
            self._counters.lookups_given_up += 1
            found = 0
        elif self._kv_events is not None and found < len(state.lookup_chunks):
            self._kv_events.missing(state.keys.keys[state.lookup_chunks[found]])
        state.redis_chunks = frozenset(state.lookup_chunks[:found])
        state.lookup = None
        return True

    def _wait_seconds(self, is_idle: bool) -> float:
        wait_seconds = self._settings.lookup_wait_seconds if self._may_wait else 0.0
        return max(wait_seconds, _IDLE_WAIT_SECONDS) if is_idle and wait_seconds else wait_seconds

    def _lookup_patience(self, state: RequestState, num_computed_tokens: int) -> float:
        """Seconds for which this request may still wait for Redis' answer."""
        if self._choice is None or self.lookup is None:
            return float("inf")
        now = self._clock()
        if state.lookup_until is None:
            state.lookup_until = now + self._choice.lookup_seconds(
                num_computed_tokens, state.request.num_tokens, self.lookup.last_seconds
            )
        return state.lookup_until - now

    def load_end(self, state: RequestState, num_computed_tokens: int) -> int:
        """The chunk where the load shall end, decided once until the request is preempted."""
        first = num_computed_tokens // self._settings.chunk_size
        end = self._hit_end(state, first)
        if state.load_end is None and end > first:
            self._decide(state, num_computed_tokens, first, end)
        return end if state.load_end is None else min(end, state.load_end)

    def _decide(self, state: RequestState, num_computed_tokens: int, first: int, end: int) -> None:
        state.load_end, state.deadline_seconds = end, self._settings.load_deadline_seconds
        request = state.request
        if self._choice is None or num_computed_tokens >= request.num_tokens:
            return
        keys = state.keys.keys[first:end]
        decision = self._choice.decide(
            num_computed_tokens, request.num_tokens, keys, self._index.has_each(keys)
        )
        state.load_end = first + decision.num_chunks
        state.deadline_seconds = decision.deadline_seconds
        declined = (end - state.load_end) * self._settings.chunk_size
        self._counters.count_decision(decision.reason.value, declined)
        logger.debug("Request %s: %s", request.request_id, decision)

    def _hit_end(self, state: RequestState, first: int) -> int:
        end = first
        for in_cpu in self._index.has_each(state.keys.keys[first:]):
            if not in_cpu and end not in state.redis_chunks:
                break
            end += 1
        return end

    def count_lookup(self, state: RequestState, num_computed_tokens: int) -> None:
        state.counted = True
        counters, first = self._counters, num_computed_tokens // self._settings.chunk_size
        counters.cpu_lookups += 1
        counters.queried_tokens += max(0, state.request.num_tokens - num_computed_tokens)
        hits = self._index.has_each(state.keys.keys[first : self._hit_end(state, first)])
        counters.cpu_lookup_hits += any(hits)
        counters.redis_lookup_hits += not all(hits)
