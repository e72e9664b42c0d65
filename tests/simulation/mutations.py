"""Bugs to put into the product, each of a kind that has happened somewhere: the simulation must
find them. What it does not find in these it would not find in real code either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def _replace(old: object, new: object) -> None:
    """Wherever a module of the product names it."""
    found = False
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("lmcache_connector"):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)
                    found = True
    assert found, f"{old} is nowhere"


def no_checksum() -> None:
    """Values are used as they come."""
    from lmcache_connector.storage.chunk_codec import check_value

    _replace(check_value, lambda *_: None)


def no_deadline() -> None:
    """Nothing on the wire ever takes too long."""
    from lmcache_connector.net.deadline import Deadline

    Deadline.remaining = lambda self: 0.0 if self.cancelled() else 3600.0  # type: ignore[method-assign]


def lost_result() -> None:
    """One result of a job in eight is not reported."""
    from lmcache_connector.worker.job_queue import JobQueue

    take, num = JobQueue.take_ended, 0

    def take_some(self: JobQueue) -> Any:
        nonlocal num
        ended = take(self)
        num += len(ended)
        return ended[:-1] if num % 8 == 0 else ended

    JobQueue.take_ended = take_some  # type: ignore[method-assign]


def short_loads_forgotten() -> None:
    """vLLM is not told that a load has ended early."""
    from lmcache_connector.vllm_compat.short_loads import compute_the_rest

    _replace(compute_the_rest, lambda *_: None)


def stores_never_cancelled() -> None:
    """A store goes on although its blocks have been given to another request."""
    from lmcache_connector.worker.job_queue import JobQueue

    JobQueue.cancel = lambda self, job_ids=None: None  # type: ignore[method-assign]


def buffer_given_back_early() -> None:
    """A read returns while a reader is still receiving into its buffers."""
    from lmcache_connector.storage.redis.read_queue import PendingRead

    def wait(self: Any) -> None:
        with self._changed:
            while (self._work or self._active) and (left := self.deadline.remaining()) > 0.0:
                self._changed.wait(min(left, 0.05))
            self._closed = True

    PendingRead.wait = wait  # type: ignore[method-assign]


def leaked_memory() -> None:
    """A chunk that was written to Redis is never given back."""
    from lmcache_connector.worker import lmcache_redis

    end = lmcache_redis._StoreEnd.__call__

    def keep(self: Any, stored: bool) -> None:
        self.memory.ref_count_up()
        end(self, stored)

    lmcache_redis._StoreEnd.__call__ = keep  # type: ignore[method-assign]


def fetched_ahead_and_kept() -> None:
    """A chunk that was fetched ahead is never given back."""
    from lmcache_connector.worker.lmcache_redis import RedisStoragePlugin

    fetch = RedisStoragePlugin.fetch

    def keep(self: Any, keys: Any, *more: Any) -> Any:
        found = fetch(self, keys, *more)
        for key in keys:
            self.local_cpu_backend.get_blocking(key)
        return found

    RedisStoragePlugin.fetch = keep  # type: ignore[method-assign, assignment]


def breaker_stays_open() -> None:
    """A server that has failed is never asked again."""
    from lmcache_connector.storage.redis.client.circuit_breaker import CircuitBreaker, CircuitState

    breaker: Any = CircuitBreaker
    breaker.may_connect = lambda self: self._state is not CircuitState.OPEN


def index_never_forgets() -> None:
    """What has left memory still counts as a hit there."""
    from lmcache_connector.lookup.chunk_index import ChunkIndex

    ChunkIndex.drop = lambda self, rank, key: None  # type: ignore[method-assign]


ALL: dict[str, tuple[Callable[[], None], str]] = {
    mutation.__name__: (mutation, failure)
    for mutation, failure in (
        (no_checksum, "WRONG BYTES"),
        (no_deadline, "deadline"),
        (lost_result, "SETTLED"),
        (short_loads_forgotten, "WRONG BYTES"),
        (stores_never_cancelled, "WRONG BYTES"),
        (buffer_given_back_early, "given back"),
        (leaked_memory, "memory leaked"),
        (fetched_ahead_and_kept, "memory leaked"),
        (breaker_stays_open, "NO HIT"),
        (index_never_forgets, "NO HIT"),
    )
}
"""By name: the bug, and what the failure that shows it says."""


def apply(name: str) -> None:
    ALL[name][0]()
