"""Writes chunks of the CPU tier to Redis: chunks that a store job adds or names, and offers of
chunks that Redis may lack.

A write can fail or never be tried: the server was away or full, the queue was full. A written
value can vanish: the server restarted, a purge, expiry. While memory holds a chunk, no request
would write it again. So chunks that requests use (`want`) are offered now and then, and chunks
whose write failed (`ended`) again. An offer is a normal write: if the value exists, it costs one
query, and renews the lifetime if so configured. While writes fail, a chunk is offered less and less
often, but as long as it is in memory and among the last 65,536 tracked.

Offers have a bounded rate and come after new writes. The store lane makes them between jobs.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_connector.bounded import Latest
from lmcache_connector.plans import PartRun, StoreJob

if TYPE_CHECKING:
    from lmcache_connector.storage.redis.tier import RedisTier
    from lmcache_connector.worker.lmcache_tier import CpuTier

_MAX_TRACKED = 1 << 16
_MAX_DOUBLINGS = 16
# A chunk is offered to Redis again only while at most so many bytes wait for its node. When the
# queue fills up, offered chunks are dropped first.
_OFFERED_BYTES = 32 << 20
_LAST = 1 << 20
_TICK_SECONDS = 0.1
_IDLE_TICK_SECONDS = 0.5
"""After a tick without offers."""
_OFFERS_PER_TICK = 16
_LOOKS_PER_TICK = 256
"""More than offers: many chunks due may belong to a node that has no room."""


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
    """Decides when to offer which chunk (no I/O), for the last 65,536 chunks wanted or written. Not
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
        """There is no room for the chunk: offer it after all chunks that are due."""
        state = self._states.get(key)
        if state is not None and not state.is_due:
            self._put(key, _State(now, state.failures, is_due=True))

    def forget(self, key: bytes) -> None:
        """Offer the chunk no more until it is wanted or written again."""
        self._states.pop(key, None)

    def take(self, now: float, limit: int) -> list[bytes]:
        """Up to ``limit`` chunks to offer now. Each ends with `ended`, `requeue` or `forget`."""
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


class RedisWrites:
    """The writes of one rank. Job lanes and the engine's step call it; writes end on the threads of
    ``redis``.

    ``report``: whether written chunks are added to ``cpu.written``. ``clock`` returns seconds.
    """

    def __init__(
        self,
        redis: RedisTier,
        cpu: CpuTier,
        pace: Pace,
        clock: Callable[[], float],
        *,
        report: bool,
    ) -> None:
        self._redis = redis
        self._cpu = cpu
        self._report = report
        self._clock = clock
        self._lock = threading.Lock()
        self._offers = Offers(pace)

    def write(self, job: StoreJob, run: PartRun, held: Collection[bytes]) -> None:
        """Write the chunks of a run that the job names, if the CPU tier has them now. ``held``:
        chunks that the tier had before the job. A full queue drops a prompt's last chunks first."""
        for key, chunk in zip(run.keys, run.chunks, strict=True):
            if key not in held if job.redis_keys is None else key in job.redis_keys:
                self._put(key, chunk)

    def want(self, keys: Iterable[bytes]) -> None:
        """Offer these chunks, which requests use and the CPU tier holds."""
        now = self._clock()
        with self._lock:
            for key in keys:
                self._offers.want(key, now)

    def offer_due(self) -> float:
        """Offer a bounded number of chunks that Redis may lack. Returns the seconds until the next
        call."""
        self._cpu.settle()  # learn which chunks requests use
        num_offered, without_room = 0, list[bytes]()
        for _ in range(_LOOKS_PER_TICK):
            if num_offered == _OFFERS_PER_TICK:
                break
            with self._lock:
                due = self._offers.take(self._clock(), 1)
            if not due:
                break
            # Queued chunks stay in the CPU tier, so offers may use little of it. An offer to a full
            # queue would count as a failed write.
            if not self._redis.has_room(due[0], _OFFERED_BYTES):
                without_room += due
                continue
            num_offered += 1
            if not self._put(due[0], _LAST):
                with self._lock:
                    self._offers.forget(due[0])
        with self._lock:
            for key in without_room:
                self._offers.requeue(key, self._clock())
        return _TICK_SECONDS if num_offered else _IDLE_TICK_SECONDS

    def _put(self, key: bytes, order: int) -> bool:
        """Queue a chunk of the CPU tier. False if the tier lacks it."""
        if (memory := self._cpu.get(key)) is None:
            return False
        value = self._cpu.value(key, memory)
        self._redis.put(key, value, partial(self._ended, key, memory), order)
        return True

    def _ended(self, key: bytes, memory: Any, stored: bool) -> None:
        """``memory``: LMCache's ``MemoryObj``."""
        memory.ref_count_down()
        with self._lock:
            self._offers.ended(key, stored, self._clock())
        if stored and self._report:
            self._cpu.written.append(key)
