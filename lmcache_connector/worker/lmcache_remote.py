"""Reads chunks that LMCache's CPU tier lacks from peers and Redis.

Memory objects come from the CPU tier's allocator and hold one value each, in canonical order, with
as many bytes as the geometry of its key says. Every object that is not returned is released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.plans import Fetched, Tier
from lmcache_connector.storage.redis.pending_read import OnArrival, arrivals_among
from lmcache_connector.worker.lmcache_plugs import LoadContext, ValueSizes, value_bytes

if TYPE_CHECKING:
    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.storage.redis.tier import RedisTier


class RemoteTiers:
    """Peers and Redis, read into memory of ``cpu``, whose ``allocate`` takes a deadline, too.

    ``share``: this rank's; chunks that it reads from their owner are not kept in ``cpu``.
    """

    def __init__(
        self,
        redis: RedisTier | None,
        peers: PeerTier | None,
        cpu: LocalCPUBackend,
        sizes: ValueSizes,
        engine_key: Callable[[bytes], CacheEngineKey],
        share: Share,
    ) -> None:
        self._peers = peers
        self._cpu = cpu
        self._sizes = sizes
        self._engine_key = engine_key
        self._share = share
        sources = ((Tier.PEER, peers), (Tier.REDIS, redis))
        self._sources = {tier: source for tier, source in sources if source is not None}

    def load(self, keys: Sequence[bytes], context: LoadContext) -> list[MemoryObj]:
        """One object per leading key that a tier has, the CPU tier included."""
        engine_keys = list(map(self._engine_key, keys))
        objects: list[MemoryObj | None] = list(map(self._cpu.get_blocking, engine_keys))
        wanted = [i for i, found in enumerate(objects) if found is None]
        missing = self._allocate(keys, wanted, context.deadline)  # some, if memory is short

        def on_arrival(count: int) -> None:
            context.on_arrival([objects[i] or missing[i] for i in range(count)])

        arrivals = arrivals_among(wanted, len(keys), on_arrival)
        hits = self._read([keys[i] for i in missing], list(missing.values()), context, arrivals)
        for (index, memory), hit in zip(missing.items(), hits, strict=True):
            if hit:
                is_trusted = context.source is None or context.source.is_trusted
                if is_trusted and not self._share.is_read_from_owner(keys[index]):
                    self._cpu.submit_put_task(engine_keys[index], memory)
                objects[index] = memory
            else:
                memory.ref_count_down()
        return _leading(objects)

    def _read(
        self,
        names: Sequence[bytes],
        objects: Sequence[MemoryObj],
        context: LoadContext,
        on_arrival: OnArrival,
    ) -> list[bool]:
        """Read each chunk into its object from the first source that has it. Returns whether each
        was read. Every source but the last gets half of the remaining time."""
        geometries = self._sizes.geometries
        values = [value_bytes(o, geometries.of(n)) for n, o in zip(names, objects, strict=True)]
        hits, left = [False] * len(names), list(range(len(names)))
        elsewhere = [i for i in left if self._share.is_read_from_owner(names[i])]
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
            arrivals = arrivals_among(left, len(names), on_arrival)
            result = read(*wanted, until, context.cancelled, arrivals)
            came = [index for index, hit in zip(left, result.hits, strict=True) if hit]
            for index in came:
                hits[index] = True
            left = [index for index in left if not hits[index]]
            has_failed = result.cut_off and not context.cancelled()
            num_bytes = sum(len(values[index]) for index in came)
            context.fetched.append(Fetched(tier, num_bytes, result.seconds, has_failed))
        return hits

    def _allocate(
        self, keys: Sequence[bytes], indices: Sequence[int], deadline: float
    ) -> dict[int, MemoryObj]:
        """An object per leading index, until memory runs out."""
        allocated: dict[int, MemoryObj] = {}
        for index in indices:
            shape = self._sizes.shape(self._sizes.geometries.of(keys[index]))
            memory = self._cpu.allocate(shape, torch.uint8, busy_loop=False, deadline=deadline)
            if memory is None:
                break
            allocated[index] = memory
        return allocated


def _half(deadline: float) -> float:
    """Half of the time until ``deadline``, as a new deadline."""
    return deadline - max(0.0, deadline - time.monotonic()) / 2


def _leading(objects: Sequence[MemoryObj | None]) -> list[MemoryObj]:
    """The objects before the first ``None``. Releases those behind it, which cannot be used."""
    end = objects.index(None) if None in objects else len(objects)
    for memory in objects[end:]:
        if memory is not None:
            memory.ref_count_down()
    return [memory for memory in objects[:end] if memory is not None]
