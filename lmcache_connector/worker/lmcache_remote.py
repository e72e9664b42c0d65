"""Reads chunks that the CPU tier lacks from other ranks, peers and Redis.

Memory objects come from the CPU tier and hold one part of a chunk each, in canonical order. Every
object that is not returned is released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmcache_connector.plans import Fetched, Tier
from lmcache_connector.storage.redis.pending_read import OnArrival, arrivals_among

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj

    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.storage.redis.tier import RedisTier
    from lmcache_connector.worker.lmcache_engine import RunTransfer
    from lmcache_connector.worker.lmcache_tier import CpuTier


class RemoteTiers:
    """Peers and Redis, read into memory of ``cpu``, which does not keep chunks that this rank reads
    from their owner."""

    def __init__(self, redis: RedisTier | None, peers: PeerTier | None, cpu: CpuTier) -> None:
        self._peers = peers
        self._cpu = cpu
        sources = ((Tier.PEER, peers), (Tier.REDIS, redis))
        self._sources = {tier: source for tier, source in sources if source is not None}

    def load(
        self, transfer: RunTransfer, on_arrival: Callable[[list[MemoryObj]], None]
    ) -> list[MemoryObj]:
        """One object per leading key of the run that a tier has, the CPU tier included.

        ``on_arrival`` gets the leading chunks so far, while others are still read. Adds to
        ``fetched`` of the transfer, one entry per tier.
        """
        keys, cpu = transfer.run.keys, self._cpu
        objects: list[MemoryObj | None] = list(map(cpu.get, keys))
        wanted = [i for i, found in enumerate(objects) if found is None]
        missing: dict[int, MemoryObj] = {}
        for index in wanted:
            if (memory := cpu.allocate(keys[index], transfer.deadline)) is None:
                break  # no memory is free: the load ends before this chunk
            missing[index] = memory

        def arrived(count: int) -> None:
            on_arrival([objects[i] or missing[i] for i in range(count)])

        arrivals = arrivals_among(wanted, len(keys), arrived)
        names = [keys[i] for i in missing]
        values = list(map(cpu.value, names, missing.values()))
        hits, source = self._read(names, values, transfer, arrivals), transfer.source
        for (index, memory), hit in zip(missing.items(), hits, strict=True):
            if hit:
                is_trusted = source is None or source.is_trusted
                if is_trusted and not cpu.is_read_from_owner(keys[index]):
                    cpu.put(keys[index], memory)
                objects[index] = memory
            else:
                memory.ref_count_down()
        return _leading(objects)

    def _read(
        self,
        names: Sequence[bytes],
        values: Sequence[memoryview],
        transfer: RunTransfer,
        on_arrival: OnArrival,
    ) -> list[bool]:
        """Read each chunk ``names[i]`` into ``values[i]`` from the first source that has it.
        Returns whether each was read. Every source but the last gets half of the remaining time."""
        deadline, is_cancelled = transfer.deadline, transfer.queued.cancelled.is_set
        hits, left = [False] * len(names), list(range(len(names)))
        elsewhere = [i for i in left if self._cpu.is_read_from_owner(names[i])]
        if self._peers is not None and elsewhere:  # other ranks' chunks count as CPU tier
            wanted = [names[i] for i in elsewhere], [values[i] for i in elsewhere]
            until = _half(deadline) if transfer.asks_all else deadline
            here = self._peers.read_ranks(*wanted, until, is_cancelled)
            for index, hit in zip(elsewhere, here, strict=True):
                hits[index] = hit
            left = [index for index in left if not hits[index]]
        if not transfer.asks_all:
            return hits
        reads: list[tuple[Tier, Callable[..., Any]]]
        reads = [(tier, each.read) for tier, each in self._sources.items()]
        if transfer.source is not None and self._peers is not None:
            reads = [(Tier.PEER, partial(self._peers.read, source=transfer.source))]
        for number, (tier, read) in enumerate(reads, start=1):
            if not left:
                break
            until = deadline if number == len(reads) else _half(deadline)
            wanted = [names[i] for i in left], [values[i] for i in left]
            arrivals = arrivals_among(left, len(names), on_arrival)
            result = read(*wanted, until, is_cancelled, arrivals)
            came = [index for index, hit in zip(left, result.hits, strict=True) if hit]
            for index in came:
                hits[index] = True
            left = [index for index in left if not hits[index]]
            has_failed = result.cut_off and not is_cancelled()
            num_bytes = sum(len(values[index]) for index in came)
            found = Fetched(tier, num_bytes, result.seconds, has_failed, result.lacks_next)
            transfer.fetched.append(found)
        return hits


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
