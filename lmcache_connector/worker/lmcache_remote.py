"""Peers and the Redis tier as a storage plugin of LMCache's engine, beside LMCache's CPU tier.

LMCache creates the plugin, and asks it for chunks that the CPU tier lacks. Memory objects come from
the CPU tier's allocator and hold one value each, in canonical order, with as many bytes as the
geometry of its key says. The plugin releases every object that it does not return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from lmcache_connector.plans import Fetched, Tier
from lmcache_connector.storage.redis.pending_read import OnArrival, arrivals_among
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.worker.lmcache_plugs import (
    LoadContext,
    ValueSizes,
    chunk_key_of,
    value_bytes,
)

if TYPE_CHECKING:
    from lmcache_connector.peers.tier import PeerTier

TIER = "lmcache_connector.redis_tier"
PEERS = "lmcache_connector.peer_tier"
"""Entries of LMCache's ``extra_config``: a `RedisTier` and a `PeerTier`, one may be missing."""


class _Contexts(threading.local):
    """The context of the current thread's load."""

    load: LoadContext | None = None


class RemoteStoragePlugin(StoragePluginInterface):
    """Loads only inside `load_context`, entered by the thread that drives the engine. Outside there
    is no deadline, so everything is a miss."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        redis: RedisTier | None = config.extra_config.get(TIER)
        peers: PeerTier | None = config.extra_config.get(PEERS)
        self._peers = peers
        sources = ((Tier.PEER, peers), (Tier.REDIS, redis))
        self._sources = {tier: source for tier, source in sources if source is not None}
        self._sizes = ValueSizes(next(iter(self._sources.values())).geometries)
        self._contexts = _Contexts()
        self.is_read_from_owner: Callable[[bytes], bool] = lambda key: False
        """See `Share.is_read_from_owner`: these chunks are read, but not kept."""
        self.on_stored: Callable[[Sequence[bytes], Sequence[MemoryObj]], None] = lambda *_: None
        """Called with chunks that LMCache's engine has stored; must not block."""

    def __str__(self) -> str:
        return type(self).__name__

    @contextmanager
    def load_context(self, context: LoadContext) -> Iterator[None]:
        """Bound and measure this thread's loads inside the ``with``."""
        self._contexts.load = context
        try:
            yield
        finally:
            self._contexts.load = None

    @property
    def deadline(self) -> float:
        """Deadline of this thread's load; infinite without one."""
        return self._contexts.load.deadline if self._contexts.load is not None else inf

    # LMCache's engine asks these, and loads only from memory.

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        return False

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        return 0

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        return False

    # Loads.

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """One object per leading key that a tier has, then ``None`` from the first miss on."""
        context = self._contexts.load
        if context is None:
            return [None] * len(keys)
        objects: list[MemoryObj | None] = [self.local_cpu_backend.get_blocking(k) for k in keys]
        wanted = [i for i, found in enumerate(objects) if found is None]
        missing = self._allocate(keys, wanted)  # some of them, if memory is short

        def on_arrival(count: int) -> None:
            context.on_arrival([objects[i] or missing[i] for i in range(count)])

        arrivals = arrivals_among(wanted, len(keys), on_arrival)
        hits = self._read([keys[i] for i in missing], list(missing.values()), context, arrivals)
        for (index, memory), hit in zip(missing.items(), hits, strict=True):
            if hit:
                is_trusted = context.source is None or context.source.is_trusted
                if is_trusted and not self.is_read_from_owner(chunk_key_of(keys[index])):
                    self.local_cpu_backend.submit_put_task(keys[index], memory)
                objects[index] = memory
            else:
                memory.ref_count_down()
        return _cut_at_first_miss(objects)

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self.batched_get_blocking([key])[0]

    def fetch(
        self, keys: Sequence[CacheEngineKey], deadline: float, cancelled: Callable[[], bool]
    ) -> tuple[int, LoadContext]:
        """Fetch chunks that memory lacks. Returns how many leading chunks memory has now, and the
        load's results. ``deadline``: a reading of the tier's clock."""
        context = LoadContext(deadline, cancelled)
        with self.load_context(context):
            objects = self.batched_get_blocking(list(keys))
        for memory in objects:
            if memory is not None:
                memory.ref_count_down()
        return len(objects) - objects.count(None), context

    # Stores.

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Any = None,
    ) -> None:
        """Peers read chunks themselves. LMCache's engine gives no callback."""
        self.on_stored(list(map(chunk_key_of, keys)), objs)

    # Redis evicts by itself, and its values belong to all instances: no pinning, no removal.

    def pin(self, key: CacheEngineKey) -> bool:
        return False

    def unpin(self, key: CacheEngineKey) -> bool:
        return False

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        return False

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        """Do nothing: the tier's owner closes it, within a bound unknown to LMCache."""

    def _read(
        self,
        keys: list[CacheEngineKey],
        objects: list[MemoryObj],
        context: LoadContext,
        on_arrival: OnArrival,
    ) -> list[bool]:
        """Read each chunk into its object from the first source that has it. Returns whether each
        was read. Every source but the last gets half of the remaining time."""
        names = [chunk_key_of(key) for key in keys]
        values = [self._value(*each) for each in zip(keys, objects, strict=True)]
        hits, left = [False] * len(keys), list(range(len(keys)))
        elsewhere = [
            i for i in left if self._peers is not None and self.is_read_from_owner(names[i])
        ]
        if self._peers is not None and elsewhere:  # other ranks' chunks count as CPU tier
            wanted = [names[i] for i in elsewhere], [values[i] for i in elsewhere]
            until = _half(context.deadline) if context.asks_all else context.deadline
            here = self._peers.read_ranks(*wanted, until, context.cancelled)
            for index, hit in zip(elsewhere, here, strict=True):
                hits[index] = hit
            left = [index for index in left if not hits[index]]
        if not context.asks_all:
            return hits
        reads = [(tier, source.read) for tier, source in self._sources.items()]
        if context.source is not None and self._peers is not None:
            reads = [(Tier.PEER, partial(self._peers.read, source=context.source))]
        for number, (tier, read) in enumerate(reads, start=1):
            if not left:
                break
            until = context.deadline if number == len(reads) else _half(context.deadline)
            wanted = [names[i] for i in left], [values[i] for i in left]
            arrivals = arrivals_among(left, len(keys), on_arrival)
            result = read(*wanted, until, context.cancelled, arrivals)
            came = [index for index, hit in zip(left, result.hits, strict=True) if hit]
            for index in came:
                hits[index] = True
            left = [index for index in left if not hits[index]]
            has_failed = result.cut_off and not context.cancelled()
            num_bytes = sum(len(values[index]) for index in came)
            context.fetched.append(Fetched(tier, num_bytes, result.seconds, has_failed))
        return hits

    def _value(self, key: CacheEngineKey, memory: MemoryObj) -> memoryview:
        return value_bytes(memory, self._sizes.geometries.of(chunk_key_of(key)))

    def _allocate(
        self, keys: Sequence[CacheEngineKey], indices: Sequence[int]
    ) -> dict[int, MemoryObj]:
        """An object per leading index, until memory runs out."""
        allocated: dict[int, MemoryObj] = {}
        for index in indices:
            shape = self._sizes.shape(self._sizes.geometries.of(chunk_key_of(keys[index])))
            memory = self.local_cpu_backend.allocate(shape, torch.uint8, busy_loop=False)
            if memory is None:
                break
            allocated[index] = memory
        return allocated


def _half(deadline: float) -> float:
    """Half of the time until ``deadline``, as a new deadline."""
    return deadline - max(0.0, deadline - time.monotonic()) / 2


def _cut_at_first_miss(objects: list[MemoryObj | None]) -> list[MemoryObj | None]:
    """Release the objects behind the first ``None``: the engine cannot use them."""
    if None not in objects:
        return objects
    end = objects.index(None)
    for memory in objects[end:]:
        if memory is not None:
            memory.ref_count_down()
    return objects[:end] + [None] * (len(objects) - end)
