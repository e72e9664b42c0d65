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


def half_a_chunk_is_a_hit() -> None:
    """A chunk of which one value is missing counts as read."""
    from lmcache_connector.storage.redis.read_queue import PendingRead

    PendingRead.hits = lambda self: [left <= 1 for left in self._left]  # type: ignore[method-assign]


def old_maps_are_kept() -> None:
    """A redirection of a look-up does not make its slot map stale."""
    from lmcache_connector.storage.redis.lookup import RedisLookup

    RedisLookup._number = (  # type: ignore[method-assign]
        lambda self, line, node: int(line[1:]) if line[:1] == b":" and line[1:].isdigit() else 0
    )


def values_stay_for_ever() -> None:
    """Written without the lifetime that was asked for."""
    from lmcache_connector.storage.redis.client.resp import set_command

    _replace(set_command, lambda name, size, _: set_command(name, size, ()))


def kept_behind_a_miss() -> None:
    """What was read behind the first chunk that is missing is never given back."""
    from lmcache_connector.worker.lmcache_redis import _cut_at_first_miss

    _replace(_cut_at_first_miss, lambda objects: objects)


def healer_looks_once() -> None:
    """A value that was wrong is removed although it has become right."""
    from lmcache_connector.storage.redis.healer import Suspect

    Suspect.is_sound = lambda self, value: False  # type: ignore[method-assign]


def no_room_after_a_failure() -> None:
    """A write that has failed takes its room in the queue for ever."""
    from lmcache_connector.storage.redis.write_queue import WriteQueue

    finish: Any = WriteQueue.finish

    def keep(self: Any, write: Any, stored: bool) -> None:
        finish(self, write, stored)
        self._num_bytes += 0 if stored else len(write.buffer)

    WriteQueue.finish = keep  # type: ignore[method-assign]


def owners_stay() -> None:
    """What was nobody's is counted as nobody's still."""
    from lmcache_connector.retention.ledger import Ledger

    Ledger._give = lambda self, chunk, name: None  # type: ignore[method-assign]


def routers_are_told_half() -> None:
    """What leaves memory is not told."""
    from lmcache_connector.kv_events.log import KvEventLog

    KvEventLog.gone = lambda self, *_: None  # type: ignore[method-assign]


def resets_ignored() -> None:
    """KV of other weights has the keys it had before."""
    from lmcache_connector.weight_names import WeightNames

    WeightNames.reset = lambda self, *_, **__: None  # type: ignore[method-assign]


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
        (index_never_forgets, "NO HIT|INDEX"),
        (half_a_chunk_is_a_hit, "WRONG BYTES"),
        (old_maps_are_kept, "NO HIT|NOT HEALED"),
        (values_stay_for_ever, "TTL"),
        (kept_behind_a_miss, "memory leaked"),
        (healer_looks_once, "REMOVED"),
        (no_room_after_a_failure, "NO HIT|NOT OFFERED"),
        (owners_stay, "OWNERS"),
        (routers_are_told_half, "EVENTS"),
        (resets_ignored, "WRONG BYTES"),
    )
}
"""By name: the bug, and a pattern of what the failure that shows it says."""


def apply(name: str) -> None:
    ALL[name][0]()
