"""One rank's CPU tier: LMCache's back end, whose chunks the ledger orders for eviction.

A memory object holds one rank's share of one part of one chunk, in the canonical form of
:mod:`lmcache_connector.storage.geometry`, as plain bytes. Two things of LMCache's back end are
replaced: its table, which is its eviction policy too, and its allocation, which waits for evictions
that the scheduler side must hear of first.

Threads: chunks come and go on any thread, under LMCache's lock, which a lane may hold while the
ledger walks a prompt. The calls that every step of the engine makes do not take it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from operator import attrgetter
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.plans import CacheEvent, LoadJob, PrefixUse, StoreJob
from lmcache_connector.retention.leaving import WAIT_SECONDS, LeavingChunks
from lmcache_connector.retention.ledger import Ledger, Limits
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries, Stripe
from lmcache_connector.worker.lmcache_start import (
    PAGE_BYTES,
    RankSettings,
    SharedMemory,
    num_pages,
)

_HEADERS = "lmcache_connector_headers"
# Share of the CPU tier kept free or announced for coming chunks, and the most announced.
_AHEAD_SHARE, _MAX_AHEAD = 1 / 8, 256
_MAX_PLANS_AWAITED = 16  # per allocation


class ChunkTable(
    MutableMapping[CacheEngineKey, MemoryObj],
    BaseCachePolicy[CacheEngineKey, MutableMapping[CacheEngineKey, MemoryObj]],
):
    """The table that LMCache's CPU tier keeps its chunks in, and the policy by which it evicts: the
    ledger's. LMCache calls it under the tier's lock.

    ``chunks``: by chunk key, which LMCache gets as an integer. ``on_change`` is called with the key
    of each chunk added or removed, once the ledger knows of it.
    """

    def __init__(
        self,
        ledger: Ledger,
        engine_key: Callable[[bytes], CacheEngineKey],
        on_change: Callable[[bytes], None],
    ) -> None:
        self.chunks: dict[bytes, MemoryObj] = {}
        self._ledger = ledger
        self._engine_key = engine_key
        self._on_change = on_change

    def __getitem__(self, key: CacheEngineKey) -> MemoryObj:
        return self.chunks[_chunk_key(key)]

    def __setitem__(self, key: CacheEngineKey, memory: MemoryObj) -> None:
        name = _chunk_key(key)
        self.chunks[name] = memory
        self._ledger.admit(name, memory.get_physical_size())
        self._on_change(name)

    def __delitem__(self, key: CacheEngineKey) -> None:
        name = _chunk_key(key)
        self._ledger.drop(name, self.chunks.pop(name))
        self._on_change(name)

    def __iter__(self) -> Iterator[CacheEngineKey]:
        return map(self._engine_key, self.chunks)

    def __len__(self) -> int:
        return len(self.chunks)

    def get_evict_candidates(self, cache_dict: object, num_candidates: int = 1) -> list[Any]:
        """``num_candidates`` keys, or none: see :meth:`Ledger.evict`."""
        return list(map(self._engine_key, self._ledger.evict(num_candidates, self.may_go)))

    def may_go(self, key: bytes) -> bool:
        return bool(self.chunks[key].can_evict)

    def init_mutable_mapping(self) -> ChunkTable:
        return self

    def update_on_put(self, *_: Any) -> None:
        """Nothing: the table has told the ledger, and each job's chunks are noted in order."""

    update_on_hit = update_on_force_evict = update_on_put


@dataclass(frozen=True, slots=True)
class ChunkLease:
    """A reference to a memory object, which LMCache therefore does not evict."""

    view: memoryview
    memory: MemoryObj
    offset: int

    @property
    def headers(self) -> dict[Stripe, bytes]:
        """Sealed so far; kept on the memory object, which LMCache creates anew for each chunk."""
        found: dict[Stripe, bytes] = vars(self.memory).setdefault(_HEADERS, {})
        return found

    def release(self) -> None:
        self.memory.ref_count_down()


class CpuTier:
    """The chunks of ``backend``, which is still empty, by chunk key. Thread-safe.

    ``geometries`` and ``share``: this rank's. ``written``: chunks put into Redis and not reported
    yet.
    """

    def __init__(
        self,
        backend: LocalCPUBackend,
        shared: SharedMemory,
        settings: RankSettings,
        geometries: PartGeometries,
        engine_key: Callable[[bytes], CacheEngineKey],
        clock: Callable[[], float],
    ) -> None:
        self._backend, self._shared, self._clock = backend, shared, clock
        if shared.descriptor is not None:  # LMCache has not allocated it
            self.keep_mapped()
        self._engine_key = engine_key
        self.geometries = geometries
        self.share = Share(settings.rank, settings.owners)
        self.is_read_from_owner = self.share.is_read_from_owner
        config = settings.config
        self.capacity_bytes = config.rank_gib * 2**30
        self._changed, self.num_leaving = deque[bytes](), 0
        self._unread, self.written = deque[bytes](), deque[bytes]()
        self.leaving = LeavingChunks(self._changed.extend)
        self._announces = settings.announces
        limits = Limits.of(self.capacity_bytes, config.tenant_share, config.pin_share)
        self.ledger = Ledger(limits, clock, self.leaving if settings.announces else None)
        self._table = ChunkTable(self.ledger, engine_key, self._changed.append)
        with backend.cpu_lock:
            backend.cache_policy = backend.hot_cache = self._table
        backend.allocate = partial(self._allocate, backend.allocate)

    # -- chunks --------------------------------------------------------------------------------

    @property
    def memory(self) -> int | None:
        """The descriptor of all memory, if other processes may map it."""
        return self._shared.descriptor

    def holds(self, key: bytes) -> bool:
        return key in self._table.chunks

    def find(self, keys: Sequence[bytes]) -> set[bytes]:
        """The chunks among ``keys`` that are here; reports them as events."""
        held = {key for key in keys if key in self._table.chunks}
        self._changed.extend(held)
        return held

    def get(self, key: bytes) -> MemoryObj | None:
        """A new reference to the chunk's memory."""
        with self._backend.cpu_lock:
            memory = self._table.chunks.get(key)
            if memory is not None:
                memory.ref_count_up()
            return memory

    def get_all(self, job: LoadJob) -> tuple[MemoryObj, ...]:
        """New references to the memory of all chunks of a load inside a step. Raises
        ``RuntimeError`` if one is gone."""
        table, removed = self._table.chunks, self.leaving.removed
        with self._backend.cpu_lock:
            found: list[Any] = [table.get(key, removed.get(key)) for key in job.keys]
            if None in found:
                raise RuntimeError(f"KV of request {job.request_id} is not in memory any more")
            for memory in found:
                memory.ref_count_up()
        return tuple(found)

    def value(self, key: bytes, memory: MemoryObj) -> memoryview:
        """The chunk's bytes in its memory. Raises ``ValueError`` for a key that names no part of
        the model."""
        return value_bytes(memory, self.geometries.of(key))

    def lease(self, key: bytes) -> ChunkLease | None:
        """Raises ``ValueError`` as `value` does."""
        if (memory := self.get(key)) is None:
            return None
        view = self.value(key, memory).toreadonly()
        return ChunkLease(view, memory, self._shared.offset_of(memory.raw_tensor))

    def allocate(self, key: bytes, deadline: float) -> MemoryObj | None:
        """Memory for a chunk; ``None`` if none becomes free well before ``deadline``."""
        shape = torch.Size([1, 1, num_pages(self.geometries.of(key)), PAGE_BYTES])
        memory: MemoryObj | None = self._backend.allocate(
            shape, torch.uint8, busy_loop=False, deadline=deadline
        )
        return memory

    def put(self, key: bytes, memory: MemoryObj) -> None:
        self._backend.submit_put_task(self._engine_key(key), memory)

    def forget(self, key: bytes) -> None:
        self._backend.remove(self._engine_key(key))

    def all_keys(self) -> list[bytes]:
        with self._backend.cpu_lock:
            return list(self._table.chunks)

    @property
    def num_chunks(self) -> int:
        """Memory objects: one per chunk and part."""
        return len(self._table.chunks)

    @property
    def used_bytes(self) -> int:
        return int(self._backend.memory_allocator.pin_allocator.total_allocated_size)

    # -- uses and evictions --------------------------------------------------------------------

    def note(self, uses: Sequence[PrefixUse]) -> None:
        """Note that requests have these chunks in their prompts. Called from the engine's step:
        the ledger processes the notes later."""
        for use in uses:
            here = tuple(key for key in use.keys if not self.is_read_from_owner(key))
            self.ledger.note(replace(use, keys=here) if len(here) < len(use.keys) else use)

    def settle(self) -> None:
        """Learn now which chunks requests use."""
        with self._backend.cpu_lock:
            self.ledger.settle()

    def use(self, job: StoreJob | LoadJob) -> None:
        """Make a job's chunks the most recent. Windows and states come after the prefix, which is
        useless without them."""
        with self._backend.cpu_lock:
            for run in sorted(job.runs, key=attrgetter("part")):
                self.ledger.use(run.keys, job.claim, run.parents)

    @contextmanager
    def expecting(self, tenant: bytes, num_bytes: int) -> Iterator[None]:
        """Expect ``num_bytes`` of the tenant inside the ``with``."""
        with self._backend.cpu_lock:
            self.ledger.expect(tenant, num_bytes)
        self.announce_ahead(num_bytes)  # else each allocation would wait for its own plan
        try:
            yield
        finally:
            with self._backend.cpu_lock:
                self.ledger.expect(tenant, -num_bytes)

    def announce_ahead(self, num_bytes: int = 0) -> None:
        """Announce evictions if less than the reserve for coming chunks, ``num_bytes`` at least, is
        free. Acts only when at most half of the evictions needed are announced."""
        ahead_bytes = max(self.capacity_bytes * _AHEAD_SHARE, num_bytes)
        free_bytes = self.capacity_bytes - self.used_bytes
        if free_bytes >= ahead_bytes or not self.num_chunks:
            return
        value_bytes = self.used_bytes / self.num_chunks
        count = min(ceil((ahead_bytes - free_bytes) / value_bytes), self.num_chunks, _MAX_AHEAD)
        if 2 * len(self.leaving) <= count:
            with self._backend.cpu_lock:
                self.ledger.announce(count, self._table.may_go)

    def _allocate(
        self,
        allocate: Callable[..., MemoryObj | None],
        *args: Any,
        deadline: float = inf,
        **more: Any,
    ) -> MemoryObj | None:
        """LMCache's allocation, retried: evictions may have to wait until the scheduler side knows
        of them, and a chunk used meanwhile must be replaced by another. Each wait takes at most
        half of a load's remaining time, which leaves some for reading."""
        for _ in range(_MAX_PLANS_AWAITED):
            acked = self.leaving.acked
            memory = allocate(*args, **more)
            if memory is not None or not self._announces:
                return memory
            self.announce_ahead()
            seconds = min(WAIT_SECONDS, max(0.0, deadline - self._clock()) / 2)
            if not self.leaving.wait(acked, seconds):
                break
        return None

    # -- reports -------------------------------------------------------------------------------

    @property
    def has_updates(self) -> bool:
        """Whether `take_events` or `take_written` would return something."""
        return bool(self._changed or self.written)

    def tell(self, keys: Iterable[bytes]) -> None:
        """Report whether these chunks are here."""
        self._changed.extend(keys)

    def tell_missed(self, key: bytes) -> None:
        """A load has found no copy of the chunk, its owner's included."""
        if not self.share.is_owner(key):
            self._unread.append(key)
        self._changed.append(key)

    def report_all(self, keys: Sequence[bytes] = ()) -> None:
        """Report all chunks again, and ``keys``: the last events may be lost, or told late."""
        self._changed.extend([*self.all_keys(), *self.leaving.removed, *keys])

    def take_events(self) -> tuple[CacheEvent, ...]:
        """For each chunk that changed since the last call: whether it is here now. Changed means
        that it came or left, is leaving or no longer leaving, was found by a store or missed by a
        load. Sets ``num_leaving`` to the number of :meth:`LeavingChunks.report`."""
        unread = [self._unread.popleft() for _ in range(len(self._unread))]
        changed = dict.fromkeys(self._changed.popleft() for _ in range(len(self._changed)))
        # An unread chunk gets a second event: the first may mean that a copy of ours has gone.
        keys, here = (*changed, *unread), self._table.chunks
        leaving, self.num_leaving = self.leaving.report(keys)
        return tuple(CacheEvent(key, key in here, is_leaving=key in leaving) for key in keys)

    def take_written(self) -> tuple[bytes, ...]:
        """Chunks written to Redis since the last call."""
        return tuple(self.written.popleft() for _ in range(len(self.written)))

    def drop_events(self) -> None:
        self._changed.clear()
        self.leaving.clear()

    def keep_mapped(self) -> None:
        """Keep LMCache's engine from freeing the memory when it closes."""
        self._backend.memory_allocator._unregistered = True

    def close(self, *, unmap: bool) -> None:
        """After LMCache's engine. ``unmap``: see :meth:`SharedMemory.close`."""
        self.leaving.clear()
        self._shared.close(unmap=unmap)


def _chunk_key(key: CacheEngineKey) -> bytes:
    return int(key.chunk_hash).to_bytes(CHUNK_KEY_BYTES, "big")


def value_bytes(memory: MemoryObj, geometry: ChunkGeometry) -> memoryview:
    """A view of the chunk's bytes in the object, without the rest of the last page."""
    return memoryview(memory.byte_array).cast("B")[: geometry.chunk_bytes]
