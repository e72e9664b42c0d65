"""Stores and loads the chunks of one rank through LMCache's engine.

``LMCacheEngine.store`` runs unchanged, with two plugged-in components:

- a token database that names chunks by the keys of the scheduler's plan (full 256 bits),
- a GPU connector that copies all chunks of a run with one call of the copier.

A memory object of LMCache's CPU tier holds one rank's share of one part of one chunk, in the
canonical form of :mod:`lmcache_connector.storage.geometry`, as plain bytes. Each run of a job (its
chunks of one part) is one store or load. Loads read LMCache's CPU tier directly; those that may
need Redis or a peer go through :mod:`lmcache_connector.worker.lmcache_remote`, and copy chunks
while more are coming.

Threads: ``store`` and ``load`` may run on several lanes at once; events come from any thread that
admits or evicts. Calls from the engine's step never wait for a lane.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from math import ceil, inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_connector.audit.compare import compare_chunks
from lmcache_connector.copy_kv_blocks.copier import Copier
from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.plans import (
    AuditJob,
    CacheEvent,
    LoadJob,
    PeerSource,
    PrefixUse,
    StoreJob,
)
from lmcache_connector.retention.leaving import WAIT_SECONDS, LeavingChunks
from lmcache_connector.retention.ledger import Ledger, Limits
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.worker.lmcache_memory import SharedMemory
from lmcache_connector.worker.lmcache_peers import CpuTierChunks
from lmcache_connector.worker.lmcache_plugs import (
    BlockCopyConnector,
    LedgerPolicy,
    LoadContext,
    LoadInStep,
    PlannedTokenDatabase,
    PlannedTokens,
    RunTransfer,
    TransferCancelled,
    ValueSizes,
)
from lmcache_connector.worker.lmcache_start import EngineSettings, make_metadata, start_engine
from lmcache_connector.worker.lmcache_writes import RedisWrites
from lmcache_connector.worker.paged_part import PagedPart, in_pieces, only

if TYPE_CHECKING:
    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.storage.redis.tier import RedisTier
    from lmcache_connector.worker.lmcache_remote import RemoteTiers
    from lmcache_connector.worker.waiting_jobs import QueuedJob

_STORES_BETWEEN_DRAINS = 256
_BY_PART = attrgetter("part")
# Share of the CPU tier that one piece of a load may take: loads run on three lanes, and chunks
# waiting to be written to Redis take up to a quarter.
_PIECE_SHARE = 1 / 8
# Share of the CPU tier kept free or announced for coming chunks, and the most values announced.
_AHEAD_SHARE, _MAX_AHEAD = 1 / 8, 256
_MAX_PLANS_AWAITED = 16  # per value


class LMCacheEngineAdapter:
    """One rank's CPU tier, with the tiers below it.

    ``copier`` copies between the blocks of ``parts``, in model order, and LMCache's memory. A job
    whose KV has no fixed place may name other caches of the same geometries. Closing the engine
    closes ``redis_tier``; ``peers`` stay with their owner. Raises :class:`ConfigError` if LMCache
    cannot start with the settings.
    """

    def __init__(
        self,
        settings: EngineSettings,
        parts: Sequence[PagedPart],
        copier: Copier,
        redis_tier: RedisTier | None,
        peers: PeerTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._parts = parts
        self._sizes = ValueSizes(PartGeometries(tuple(part.geometry for part in parts)))
        self._piece_bytes = int(settings.rank_gib * 2**30 * _PIECE_SHARE)
        self._num_stores = 0
        metadata = make_metadata(settings, self._sizes)
        self._database = PlannedTokenDatabase(metadata)
        self._blocks = BlockCopyConnector(self._sizes, copier, clock)
        self.fence = copier.fence  # marks the device work submitted so far
        self._shared = SharedMemory()
        with self._shared.allocating() if settings.shares_memory else nullcontext():
            self._engine = start_engine(settings, metadata, self._database, self._blocks)
        backends = self._engine.storage_manager.storage_backends
        self._cpu: LocalCPUBackend = backends["LocalCPUBackend"]
        self._shared.keep(self._cpu)
        self._capacity_bytes = settings.rank_gib * 2**30
        limits = Limits.of(self._capacity_bytes, settings.tenant_share, settings.pin_share)
        self._changed, self.num_leaving, self._unread = deque[bytes](), 0, deque[bytes]()
        self.leaving = LeavingChunks(self._changed.extend)
        self._announces = settings.announces
        self.ledger = Ledger(limits, clock, self.leaving if settings.announces else None)
        self._policy = LedgerPolicy(self.ledger, self._database.engine_key, self._changed.append)
        self._policy.install(self._cpu)
        self._cpu.allocate = partial(self._allocate, self._cpu.allocate)
        self.share = Share(settings.rank, settings.owners)
        if peers is not None:
            self.share.is_away = peers.is_away
        self._remote: RemoteTiers | None = None
        if redis_tier is not None or peers is not None:
            # Late import: it brings blosc2, unused without remote tiers.
            from lmcache_connector.worker.lmcache_remote import RemoteTiers

            engine_key = self._database.engine_key
            self._remote = RemoteTiers(
                redis_tier, peers, self._cpu, self._sizes, engine_key, self.share
            )
        self.chunks = CpuTierChunks(
            self._cpu, self._database, self._sizes.geometries, self._shared, self.share
        )
        self.writes: RedisWrites | None = None
        if redis_tier is not None:
            self.writes = RedisWrites(
                redis_tier,
                self._cpu,
                self._database,
                settings.pace,
                clock,
                report=settings.report_writes,
            )
            self.ledger.on_noted_use = self.writes.want

    def store(self, job: StoreJob, queued: QueuedJob) -> list[RunTransfer]:
        """Copy chunks that the CPU tier lacks out of the paged cache; blocks the calling thread.

        Chunks that the tier has go on to Redis if the job says so, and are reported as events,
        since the scheduler side did not know of them. Chunks that another rank stores, or that do
        not pass the gate, are left out. Raises the copy's errors.
        """
        transfers = []
        for run in job.runs:
            part = (queued.parts or self._parts)[run.part]
            held = set(filter(self.chunks.holds, run.keys))
            self._changed.extend(held)
            missing = only(run, [i for i, key in enumerate(run.keys) if self._is_missing(key)])
            transfer = RunTransfer(missing, part, queued)
            if self.writes is not None:
                transfer.on_copied = partial(self.writes.stored, job, missing)
            transfers.append(transfer)
            if missing.keys and not queued.cancelled.is_set():
                num_bytes = len(missing.keys) * part.geometry.chunk_bytes
                tokens = PlannedTokens(missing.keys, self._sizes.num_units(part.geometry))
                with self._expecting(job.claim.tenant, num_bytes), suppress(TransferCancelled):
                    self._engine.store(tokens=tokens, transfer=transfer)
                self._num_stores += 1
                if self._num_stores % _STORES_BETWEEN_DRAINS == 0:  # no reporter reads LMCache's
                    self._engine.stats_monitor.get_stats_and_clear()
            if self.writes is not None:
                self.writes.share(job, run, held)
        self._use(job)
        self._announce_ahead()
        return transfers

    def load(self, job: LoadJob, queued: QueuedJob) -> list[RunTransfer]:
        """Copy chunks into the paged cache. After an incomplete run the load ends, and events
        report its missing chunks. Large runs are loaded in pieces, because a prompt may exceed the
        CPU tier.

        A load planned from the CPU tier never asks Redis, even if a chunk was evicted meanwhile: a
        slow Redis must not block the CPU lane. Raises the copy's errors.
        """
        transfers = list[RunTransfer]()
        for run in job.runs:
            part = (queued.parts or self._parts)[run.part]
            size = max(1, self._piece_bytes // part.geometry.chunk_bytes)
            pieces = in_pieces(run, size, part.blocks_per_chunk)
            transfers += [RunTransfer(piece, part, queued) for piece in pieces]
        self._use(job)  # so that fetched chunks evict others
        for transfer in transfers:
            keys = transfer.run.keys
            num_missing = sum(map(self._is_missing, keys)) if job.may_fetch else 0
            num_bytes = num_missing * transfer.paged.geometry.chunk_bytes
            with self._expecting(job.claim.tenant, num_bytes) if num_bytes else nullcontext():
                self._retrieve(transfer, queued.deadline, job.source, asks_all=job.may_fetch)
            if num_bytes:  # else the next piece would evict another tenant's chunks
                self._use(job)
            if transfer.num_chunks < len(keys):
                first, *others = keys[transfer.num_chunks :]
                # Other ranks were not asked for these chunks, which may still be there.
                self._changed.extend(k for k in others if not self.share.is_read_from_owner(k))
                if not queued.cancelled.is_set():
                    if not self.share.is_owner(first):
                        self._unread.append(first)
                    self._changed.append(first)
                break
        if job.may_fetch:
            self._announce_ahead()
        return transfers

    def load_in_step(self, job: LoadJob) -> LoadInStep:
        """Copy a job's chunks ahead of the device's next forward pass. Raises ``RuntimeError``,
        before any copy, if a chunk is not in memory; also raises the copy's errors."""
        started, load = self._clock(), LoadInStep(job, self._take(job))
        try:
            self._blocks.enqueue(load, self._parts)
        except Exception:
            load.release()
            raise
        load.seconds = self._clock() - started
        self.use([PrefixUse(job.claim, run.keys) for run in sorted(job.runs, key=_BY_PART)])
        return load

    def compare(
        self, job: AuditJob, queued: QueuedJob, has_read: Callable[[], None]
    ) -> RunTransfer:
        """Copy the job's chunk out of the paged cache, and compare it with a tier's copy.

        ``differences`` stay empty if no tier delivers by the job's deadline, or vLLM reused the
        blocks. Calls ``has_read`` once the blocks are no longer needed. Raises the copy's errors.
        """
        (run,) = job.runs
        part = self._parts[run.part]
        transfer = RunTransfer(run, part, queued)
        computed = bytearray(part.geometry.chunk_bytes)
        self._blocks.copy_out(transfer, np.frombuffer(computed, np.uint8))
        transfer.compare = lambda stored: compare_chunks(
            memoryview(computed), stored, part.geometry, part.formats, planar=part.is_planar
        )
        is_sound = queued.gate.passes(queued.cancelled)
        has_read()
        if is_sound:
            deadline = self._clock() + job.deadline_seconds
            self._retrieve(transfer, deadline, asks_all=job.may_fetch)
            self._use(job)
        return transfer

    def use(self, uses: Sequence[PrefixUse]) -> None:
        """Note that requests have these chunks in their prompts. Called from the engine's step:
        the ledger processes the notes later."""
        for use in uses:
            here = tuple(key for key in use.keys if not self.share.is_read_from_owner(key))
            self.ledger.note(replace(use, keys=here) if len(here) < len(use.keys) else use)

    def offer_due(self) -> float:
        """Offer chunks that Redis may lack. Returns the seconds until the next call."""
        if self.writes is None:
            return threading.TIMEOUT_MAX
        with self._cpu.cpu_lock:
            self.ledger.settle()  # learn which chunks requests use
        return self.writes.offer_due()

    def forget(self, key: bytes) -> None:
        self._cpu.remove(self._database.engine_key(key))

    @property
    def has_updates(self) -> bool:
        """Whether `take_events`, or `take_written` of ``writes``, would return something."""
        return bool(self._changed or (self.writes is not None and self.writes.written))

    def take_events(self) -> tuple[CacheEvent, ...]:
        """For each chunk that changed since the last call: whether the CPU tier has it now. Changed
        means that it came or left, is leaving or no longer leaving, was found by a store or missed
        by a load. Sets ``num_leaving`` to the number of :meth:`LeavingChunks.report`."""
        unread = [self._unread.popleft() for _ in range(len(self._unread))]
        changed = dict.fromkeys(self._changed.popleft() for _ in range(len(self._changed)))
        # A copy that was here may have gone too, and that is less.
        cache, keys = self._cpu.hot_cache, (*changed, *unread)
        leaving, self.num_leaving = self.leaving.report(keys)
        return tuple(
            CacheEvent(key, self._database.engine_key(key) in cache, is_leaving=key in leaving)
            for key in keys
        )

    def drop_events(self) -> None:
        """Drop all events so far."""
        self._changed.clear()
        self.leaving.clear()

    def report_all(self, keys: Sequence[bytes] = ()) -> None:
        """Report all chunks again, and ``keys``: the last events may be lost, or told late."""
        self._changed.extend([*self.chunks.all_keys(), *self.leaving.removed, *keys])

    @property
    def num_chunks(self) -> int:
        """Values in the CPU tier: one per chunk and part."""
        return len(self._cpu.hot_cache)

    @property
    def used_bytes(self) -> int:
        """Used bytes of the CPU tier."""
        return int(self._cpu.memory_allocator.pin_allocator.total_allocated_size)

    def close(self, seconds: float, *, unmap: bool = True) -> None:
        """Give queued writes to Redis ``seconds``, then drop everything. ``unmap``: see
        :meth:`SharedMemory.close`."""
        if self.writes is not None:
            self.writes.close(seconds)
        self._engine.close()
        self.leaving.clear()
        self._shared.close(unmap=unmap)

    def _retrieve(
        self,
        transfer: RunTransfer,
        deadline: float,
        source: PeerSource | None = None,
        *,
        asks_all: bool,
    ) -> None:
        """Load a run; without ``asks_all`` only from CPU tiers of this engine's ranks."""
        is_asked = asks_all or any(map(self.share.is_read_from_owner, transfer.run.keys))
        copy = partial(self._blocks.copy_in, transfer)
        context = LoadContext(deadline, transfer.queued.cancelled.is_set, source, asks_all, copy)
        if self._remote is None or not is_asked:
            found = map(self._cpu.get_blocking, map(self._database.engine_key, transfer.run.keys))
            objects = list(takewhile(lambda memory: memory is not None, found))
        else:
            objects = self._remote.load(transfer.run.keys, context)
        copy(objects)
        for memory in objects:
            memory.ref_count_down()
        transfer.fetched = tuple(context.fetched)
        if transfer.error is not None and not isinstance(transfer.error, TransferCancelled):
            raise transfer.error

    def _take(self, job: LoadJob) -> tuple[MemoryObj, ...]:
        """Take references to the memory of the job's chunks."""
        table, removed = self._cpu.hot_cache, self.leaving.removed
        with self._cpu.cpu_lock:
            found = [table.get(self._database.engine_key(k), removed.get(k)) for k in job.keys]
            if None in found:
                raise RuntimeError(f"KV of request {job.request_id} is not in memory any more")
            for memory in found:
                memory.ref_count_up()
        return tuple(found)

    def _is_missing(self, key: bytes) -> bool:
        """Whether the CPU tier lacks a chunk that this rank stores."""
        return not (self.share.is_read_from_owner(key) or self.chunks.holds(key))

    @contextmanager
    def _expecting(self, tenant: bytes, num_bytes: int) -> Iterator[None]:
        """Expect ``num_bytes`` of the tenant in the CPU tier inside the ``with``."""
        with self._cpu.cpu_lock:
            self.ledger.expect(tenant, num_bytes)
        self._announce_ahead(num_bytes)  # else each value would wait for a plan of its own
        try:
            yield
        finally:
            with self._cpu.cpu_lock:
                self.ledger.expect(tenant, -num_bytes)

    def _use(self, job: StoreJob | LoadJob) -> None:
        """Make a job's chunks the most recent of the CPU tier. Windows and states come after the
        prefix, which is useless without them."""
        with self._cpu.cpu_lock:
            for run in sorted(job.runs, key=_BY_PART):
                self.ledger.use(run.keys, job.claim, run.parents)

    def _allocate(
        self,
        allocate: Callable[..., MemoryObj | None],
        *args: Any,
        deadline: float = inf,
        **more: Any,
    ) -> MemoryObj | None:
        """LMCache's allocation, retried: evictions may have to wait until the scheduler side knows
        of them, and a chunk used meanwhile must be replaced by another. A load waits for half of
        its remaining time, and reads in the other half."""
        for _ in range(_MAX_PLANS_AWAITED):
            acked = self.leaving.acked
            memory = allocate(*args, **more)
            if memory is not None or not self._announces:
                return memory
            self._announce_ahead()
            seconds = min(WAIT_SECONDS, max(0.0, deadline - self._clock()) / 2)
            if not self.leaving.wait(acked, seconds):
                break
        return None

    def _announce_ahead(self, num_bytes: int = 0) -> None:
        """Announce evictions if less than the reserve for coming chunks, ``num_bytes`` at least, is
        free. Acts once half of the last announcement is used up."""
        ahead_bytes = max(self._capacity_bytes * _AHEAD_SHARE, num_bytes)
        free_bytes = self._capacity_bytes - self.used_bytes
        if free_bytes >= ahead_bytes or not self.num_chunks:
            return
        value_bytes = self.used_bytes / self.num_chunks
        count = min(ceil((ahead_bytes - free_bytes) / value_bytes), self.num_chunks, _MAX_AHEAD)
        if 2 * len(self.leaving) <= count:
            with self._cpu.cpu_lock:
                self._policy.announce(self._cpu.hot_cache, count)
