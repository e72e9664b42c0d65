"""The Redis tier as LMCache's engine sees it: a storage plugin beside its CPU tier.

LMCache makes the plugin and asks it when the CPU tier's own prefix of a prompt ends. Memory
objects come from the CPU tier's allocator and hold one chunk each, ``geometry.chunk_bytes`` bytes
in canonical order. Every object this does not return, or hand to the tier until it is written, it
releases.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from lmcache_connector.net.deadline import never
from lmcache_connector.storage.redis.tier import RedisTier

TIER = "lmcache_connector.redis_tier"
"""The entry of LMCache's ``extra_config`` that holds the ready-built `RedisTier`."""


@dataclass
class LoadContext:
    """What one load may cost, and what it did: ``deadline`` is a reading of the tier's clock, in
    seconds. ``redis_bytes`` came from Redis in ``redis_seconds``, and not all that was asked for
    if ``cut_off``, because the servers were too slow or broke."""

    deadline: float
    cancelled: Callable[[], bool] = never
    redis_bytes: int = 0
    redis_seconds: float = 0.0
    cut_off: bool = False


@dataclass(frozen=True)
class StoreContext:
    """See `RedisStoragePlugin.store_context`."""

    first_chunk: int = 0
    on_done: Callable[[bytes, bool], None] | None = None
    wanted: Collection[bytes] | None = None


class RedisStoragePlugin(StoragePluginInterface):
    """Loads only inside `load_context`, entered by the thread that drives the engine; outside of
    it there is no deadline to keep, so everything is a miss."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        self._tier: RedisTier = config.extra_config[TIER]
        geometry = self._tier.geometry
        self._shape = torch.Size([1, 1, geometry.num_tokens, geometry.bytes_per_token])
        self._per_thread = threading.local()

    def __str__(self) -> str:
        return type(self).__name__

    @contextmanager
    def load_context(
        self, deadline: float, cancelled: Callable[[], bool] = never
    ) -> Iterator[LoadContext]:
        """Bound and measure the loads this thread makes inside the ``with``."""
        context = self._per_thread.load = LoadContext(deadline, cancelled)
        try:
            yield context
        finally:
            self._per_thread.load = None

    @contextmanager
    def store_context(
        self,
        first_chunk: int,
        on_done: Callable[[bytes, bool], None] | None = None,
        wanted: Collection[bytes] | None = None,
    ) -> Iterator[None]:
        """The stores this thread makes inside begin at chunk ``first_chunk`` of their prompt;
        ``on_done(key, stored)`` hears of each chunk once, from any thread. Chunks not ``wanted``
        are passed over; ``None`` wants all."""
        self._per_thread.store = StoreContext(first_chunk, on_done, wanted)
        try:
            yield
        finally:
            self._per_thread.store = StoreContext()

    # What the engine asks before it loads. The scheduler has looked already and only a load can
    # tell, so the answer costs nothing and may prove wrong: a missing chunk is then a short load.

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        return self._load_context is not None

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        return len(keys) if self._load_context is not None else 0

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        return False

    # Loads.

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """One object per leading key that is here, None from the first that is not."""
        context = self._load_context
        if context is None:
            return [None] * len(keys)
        objects: list[MemoryObj | None] = [self.local_cpu_backend.get_blocking(k) for k in keys]
        wanted = self._allocate([i for i, found in enumerate(objects) if found is None])
        for (index, memory), hit in zip(wanted.items(), self._fetch(keys, wanted), strict=True):
            if hit:
                self.local_cpu_backend.submit_put_task(keys[index], memory)
                objects[index] = memory
            else:
                memory.ref_count_down()
        return _cut_at_first_miss(objects)

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self.batched_get_blocking([key])[0]

    # Stores.

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Queue the chunks for writing; never blocks."""
        context: StoreContext = getattr(self._per_thread, "store", StoreContext())
        pairs = zip(keys, objs, strict=True)
        for order, (key, memory) in enumerate(pairs, start=context.first_chunk):
            if context.wanted is not None and chunk_key(key) not in context.wanted:
                continue
            memory.ref_count_up()
            finished = _StoreEnd(key, memory, context.on_done, on_complete_callback)
            self._tier.put(chunk_key(key), chunk_bytes(memory), finished, order)

    # Redis evicts for itself, and what is in it belongs to all instances.

    def pin(self, key: CacheEngineKey) -> bool:
        return False

    def unpin(self, key: CacheEngineKey) -> bool:
        return False

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        return False

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        """The tier's owner closes it, with a bound that LMCache does not know."""

    @property
    def _load_context(self) -> LoadContext | None:
        return getattr(self._per_thread, "load", None)

    def _fetch(self, keys: list[CacheEngineKey], wanted: dict[int, MemoryObj]) -> list[bool]:
        context = self._load_context
        if context is None or not wanted:
            return []
        fetched = self._tier.fetch(
            [chunk_key(keys[i]) for i in wanted],
            [chunk_bytes(memory) for memory in wanted.values()],
            context.deadline,
            context.cancelled,
        )
        context.redis_bytes += sum(fetched.hits) * self._tier.geometry.chunk_bytes
        context.redis_seconds += fetched.seconds
        context.cut_off = context.cut_off or fetched.cut_off
        return fetched.hits

    def _allocate(self, indices: Sequence[int]) -> dict[int, MemoryObj]:
        """An object for each index, in order, up to the first for which there is no memory."""
        allocated: dict[int, MemoryObj] = {}
        for index in indices:
            memory = self.local_cpu_backend.allocate(self._shape, torch.uint8, busy_loop=False)
            if memory is None:
                break
            allocated[index] = memory
        return allocated


@dataclass(frozen=True)
class _StoreEnd:
    """Releases a chunk that was written, or given up, and says so."""

    key: CacheEngineKey
    memory: MemoryObj
    on_done: Callable[[bytes, bool], None] | None
    on_complete: Callable[[CacheEngineKey], None] | None

    def __call__(self, stored: bool) -> None:
        self.memory.ref_count_down()
        if self.on_done is not None:
            self.on_done(chunk_key(self.key), stored)
        if stored and self.on_complete is not None:
            self.on_complete(self.key)


def chunk_key(key: CacheEngineKey) -> bytes:
    """The 32-byte chunk key; our token database hands it to LMCache as an integer."""
    return int(key.chunk_hash).to_bytes(32, "big")


def chunk_bytes(memory: MemoryObj) -> memoryview:
    """The object's own bytes, without a copy."""
    return memoryview(memory.byte_array).cast("B")


def _cut_at_first_miss(objects: list[MemoryObj | None]) -> list[MemoryObj | None]:
    """Release and forget what follows the first None: the engine has no use for it."""
    if None not in objects:
        return objects
    end = objects.index(None)
    for memory in objects[end:]:
        if memory is not None:
            memory.ref_count_down()
    return objects[:end] + [None] * (len(objects) - end)
