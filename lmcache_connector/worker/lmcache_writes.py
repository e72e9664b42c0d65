"""Writes chunks of LMCache's CPU tier to Redis: newly stored ones, chunks that the tier had before,
and chunks that Redis has lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_connector.plans import PartRun, StoreJob
from lmcache_connector.worker.lmcache_plugs import PlannedTokenDatabase, value_bytes
from lmcache_connector.worker.offers import Offers, Pace

if TYPE_CHECKING:
    from lmcache_connector.storage.redis.tier import RedisTier

# A chunk is offered to Redis again only while at most so many bytes wait for its node. When the
# queue fills up, offered chunks are dropped first.
_OFFERED_BYTES = 32 << 20
_LAST = 1 << 20
_TICK_SECONDS = 0.1
_IDLE_TICK_SECONDS = 0.5
"""After a tick without offers."""
_OFFERS_PER_TICK = 16
_LOOKS_PER_TICK = 256
"""Most chunks examined may belong to a slow node."""


class RedisWrites:
    """The writes of one rank. Job lanes and the engine's step call it; writes end on the tier's
    threads.

    ``report``: whether `take_written` reports written chunks. ``written``: those not yet reported.
    ``clock`` returns seconds.
    """

    def __init__(
        self,
        tier: RedisTier,
        cpu: LocalCPUBackend,
        database: PlannedTokenDatabase,
        pace: Pace,
        clock: Callable[[], float],
        *,
        report: bool,
    ) -> None:
        self._tier = tier
        self._cpu = cpu
        self._database = database
        self._report = report
        self.written: deque[bytes] = deque()
        self._clock = clock
        self._lock = threading.Lock()
        self._offers = Offers(pace)

    def stored(self, job: StoreJob, run: PartRun, objects: Sequence[MemoryObj]) -> None:
        """Write the run's leading chunks, which ``objects`` hold now, if the job says so. Of a full
        queue, later chunks of a prompt are dropped first."""
        for key, chunk, memory in zip(run.keys, run.chunks, objects, strict=False):
            if job.redis_keys is None or key in job.redis_keys:
                self._write(key, memory, chunk)

    def share(self, job: StoreJob, run: PartRun, held: Collection[bytes]) -> None:
        """Write the run's chunks that the CPU tier had before the job, if the job says so."""
        for key, chunk in zip(run.keys, run.chunks, strict=True):
            if key in held and key in (job.redis_keys or ()):
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
            if not self._tier.has_room(due[0], _OFFERED_BYTES):
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

    def take_written(self) -> tuple[bytes, ...]:
        """Chunks written to Redis since the last call."""
        return tuple(self.written.popleft() for _ in range(len(self.written)))

    def close(self, seconds: float) -> None:
        """Close the tier; queued writes get ``seconds``."""
        self._tier.close(seconds)

    def _put(self, key: bytes, order: int) -> bool:
        """Queue a chunk of the CPU tier. False if the tier lacks it."""
        # With a reference, unless just evicted.
        memory = self._cpu.get_blocking(self._database.engine_key(key))
        if memory is None:
            return False
        self._write(key, memory, order)
        memory.ref_count_down()
        return True

    def _write(self, key: bytes, memory: MemoryObj, order: int) -> None:
        memory.ref_count_up()
        value = value_bytes(memory, self._tier.geometries.of(key))
        self._tier.put(key, value, partial(self._ended, key, memory), order)

    def _ended(self, key: bytes, memory: MemoryObj, stored: bool) -> None:
        memory.ref_count_down()
        with self._lock:
            self._offers.ended(key, stored, self._clock())
        if stored and self._report:
            self.written.append(key)
