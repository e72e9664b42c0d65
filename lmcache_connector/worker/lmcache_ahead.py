"""Chunks fetched from Redis into LMCache's CPU tier for requests that still wait in a queue."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence

from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_connector.worker.lmcache_plugs import PlannedTokenDatabase
from lmcache_connector.worker.lmcache_redis import LoadContext, RedisStoragePlugin


class FetchedAhead:
    """One rank's. Remembers which chunks nobody has used since: once nobody waits for them any
    more, they are the next to be evicted. Thread-safe."""

    def __init__(self, cpu: LocalCPUBackend, database: PlannedTokenDatabase) -> None:
        self._cpu = cpu
        self._database = database
        self._lock = threading.Lock()
        self._unused: set[bytes] = set()

    def __len__(self) -> int:
        """Chunks that nobody has used."""
        return len(self._unused)

    def fetch(
        self,
        plugin: RedisStoragePlugin,
        keys: Sequence[bytes],
        deadline: float,
        cancelled: threading.Event,
    ) -> tuple[int, LoadContext]:
        """Bring chunks that memory lacks. How many of the leading ones are there now, and what
        that took. ``deadline``: a reading of ``time.monotonic``."""
        with plugin.load_context(deadline, cancelled.is_set) as context:
            objects = plugin.batched_get_blocking(list(map(self._database.engine_key, keys)))
        for memory in objects:
            if memory is not None:
                memory.ref_count_down()
        with self._lock:
            self._unused.update(key for key in keys if self._is_held(key))
        if cancelled.is_set():  # it may have been told before it came
            self.let_go_first(keys)
        return len(objects) - objects.count(None), context

    def used(self, keys: Iterable[bytes]) -> None:
        """Somebody uses them, or they are gone."""
        if self._unused:
            with self._lock:
                self._unused.difference_update(keys)

    def let_go_first(self, keys: Collection[bytes]) -> None:
        """Nobody waits for these any more. Those that were used meanwhile stay where they are."""
        with self._lock:
            unused = self._unused.intersection(keys)
            self._unused -= unused
        with self._cpu.cpu_lock:
            cache = self._cpu.hot_cache
            for engine_key in map(self._database.engine_key, unused):
                if engine_key in cache:
                    cache.move_to_end(engine_key, last=False)

    def _is_held(self, key: bytes) -> bool:
        return bool(self._cpu.contains(self._database.engine_key(key)))
