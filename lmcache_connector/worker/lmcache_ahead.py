"""Chunks fetched from Redis into LMCache's CPU tier for requests that still wait in a queue."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_connector.retention.ledger import Ledger
from lmcache_connector.worker.lmcache_plugs import PlannedTokenDatabase
from lmcache_connector.worker.lmcache_redis import LoadContext, RedisStoragePlugin


class FetchedAhead:
    """One rank's. What it has brought is nobody's until a job uses it, and goes first once nobody
    waits for it any more. Thread-safe."""

    def __init__(
        self, cpu: LocalCPUBackend, database: PlannedTokenDatabase, ledger: Ledger
    ) -> None:
        self._cpu = cpu
        self._database = database
        self._ledger = ledger

    def __len__(self) -> int:
        """Chunks that nobody has used."""
        with self._cpu.cpu_lock:
            return self._ledger.num_unused

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
        if cancelled.is_set():  # it may have been told before it came
            self.let_go_first(keys)
        return len(objects) - objects.count(None), context

    def let_go_first(self, keys: Collection[bytes]) -> None:
        """Nobody waits for these any more. Those that were used meanwhile stay where they are."""
        with self._cpu.cpu_lock:
            self._ledger.give_up(keys)
