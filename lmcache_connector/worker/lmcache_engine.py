"""Stores and loads the chunks of one rank through LMCache's engine.

``LMCacheEngine.store`` runs unchanged, with two plugged-in components: chunks are named by the keys
of the scheduler's plan (full 256 bits), and the GPU connector copies all chunks of a run with one
call of the copier. Each run of a job (its chunks of one part) is one store, or loads of several
pieces. Loads read the CPU tier directly; if Redis, a peer or another rank may have to be read, they
go through :mod:`lmcache_connector.worker.lmcache_remote`, and copy chunks while more are coming.

Threads: lanes call ``store``, ``load``, ``compare`` concurrently, the step ``load_in_step``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj

from lmcache_connector.audit.compare import compare_chunks
from lmcache_connector.copy_kv_blocks.copier import Copier, QueuedCopy
from lmcache_connector.plans import (
    AuditJob,
    Fetched,
    JobResult,
    LayerDifference,
    LoadJob,
    Outcome,
    PartRun,
    PeerSource,
    PrefixUse,
    StoreJob,
)
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.worker.lmcache_start import (
    PAGE_BYTES,
    ChunkNames,
    RankSettings,
    SharedMemory,
    num_pages,
    start_engine,
)
from lmcache_connector.worker.lmcache_tier import CpuTier, value_bytes
from lmcache_connector.worker.paged_part import PagedPart, in_pieces, only, piece
from lmcache_connector.worker.redis_writes import Pace, RedisWrites

if TYPE_CHECKING:
    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.storage.redis.tier import RedisTier
    from lmcache_connector.worker.job_queue import QueuedJob
    from lmcache_connector.worker.lmcache_remote import RemoteTiers

logger = logging.getLogger(__name__)

_STORES_BETWEEN_DRAINS = 256
# Share of the CPU tier that one piece of a load may take: loads run on three lanes, and chunks
# waiting to be written to Redis take up to a quarter.
_PIECE_SHARE = 1 / 8


@dataclass(slots=True)
class LoadInStep:
    """A load that the next forward pass reads: copies that the host has made, or the device makes
    before that pass, and references to their chunks' memory. ``seconds``: to make or queue them."""

    job: LoadJob
    memory: tuple[MemoryObj, ...]
    copies: list[QueuedCopy] = field(default_factory=list)
    seconds: float = 0.0

    def release(self) -> None:
        for each in self.memory:
            each.ref_count_down()

    def take_result(self) -> JobResult | None:
        """The result, after releasing the memory; ``None`` while the device still copies."""
        if not all(copy.is_done for copy in self.copies):
            return None
        seconds = sum(copy.seconds for copy in self.copies) or self.seconds
        num_chunks, num_bytes = len(self.job.keys), sum(copy.num_bytes for copy in self.copies)
        self.release()
        return JobResult(
            self.job.job_id, Outcome.DONE, num_chunks, num_bytes, seconds, copy_seconds=seconds
        )


@dataclass(slots=True)
class RunTransfer:
    """The transfer of a run, or of a piece of one, between a tier and the paged cache ``paged``.

    A load ends at ``deadline``, a reading of the tiers' clock in seconds. ``source``: the only
    instance to read from; if trusted, its values stay in the CPU tier. Without ``asks_all``, the
    load reads only from CPU tiers of this engine's ranks. A load with ``compare`` goes into no
    blocks: ``compare`` gets a tier's copy of its one chunk.

    Results: ``num_bytes`` and ``num_chunks`` copied, the leading ones; ``fetched``: what each peer
    or Redis tier delivered; ``copy_seconds`` of a load, ``differences`` of an audit.
    """

    run: PartRun
    paged: PagedPart
    queued: QueuedJob
    deadline: float = inf
    source: PeerSource | None = None
    asks_all: bool = False
    compare: Callable[[memoryview], tuple[LayerDifference, ...]] | None = None
    num_bytes: int = 0
    num_chunks: int = 0
    copy_seconds: float = 0.0
    fetched: list[Fetched] = field(default_factory=list)
    differences: tuple[LayerDifference, ...] = ()
    error: Exception | None = None


class TransferCancelled(Exception):
    """The job was cancelled while it ran. A store's copies are void: vLLM may reuse its blocks."""


class BlockCopyConnector(GPUConnectorInterface):
    """Copies the chunks of a run between LMCache's memory and the paged cache in one call."""

    def __init__(self, copier: Copier, clock: Callable[[], float]) -> None:
        self._copier = copier
        self._clock = clock

    def batched_from_gpu(
        self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Raises the copy's errors, or :class:`TransferCancelled`; then nothing is stored."""
        transfer: RunTransfer = kwargs["transfer"]
        run, queued = transfer.run, transfer.queued
        try:
            addresses = [obj.data_ptr for obj in memory_objs]
            if run.tail_tokens:  # a run of one chunk; without a tail the copy fills the value
                view = value_bytes(memory_objs[0], transfer.paged.geometry)
                value = np.frombuffer(view, np.uint8)
                value[:] = 0
            copies = transfer.paged.copies(run, addresses, memory_objs, to_chunks=True)
            transfer.num_bytes = self._copier.copy(copies, "d2h", queued.fence)
            if run.tail_tokens:
                transfer.paged.clear_after(run.tail_tokens, value)
            if not queued.gate.passes(queued.cancelled):
                raise TransferCancelled
        except Exception:
            for memory_obj in memory_objs:  # LMCache forgets them when this call raises
                memory_obj.ref_count_down()
            raise
        transfer.num_chunks = len(memory_objs)

    def copy_in(self, transfer: RunTransfer, memory_objs: Sequence[MemoryObj]) -> None:
        """Copy, or compare, the chunks among the run's leading ones that were not copied yet. Never
        raises, because a tier calls this while it still reads: see ``transfer.error``."""
        start, end = transfer.num_chunks, len(memory_objs)
        if transfer.error is not None or start == end:
            return
        if transfer.queued.cancelled.is_set():
            transfer.error = TransferCancelled()
            return
        try:
            if transfer.compare is not None:
                stored = value_bytes(memory_objs[0], transfer.paged.geometry)
                transfer.differences = transfer.compare(stored)
            else:
                objects = memory_objs[start:]
                run = piece(transfer.run, start, end, transfer.paged.blocks_per_chunk)
                addresses = [obj.data_ptr for obj in objects]
                copies = transfer.paged.copies(run, addresses, objects, to_chunks=False)
                began = self._clock()
                transfer.num_bytes += self._copier.copy(copies, "h2d", transfer.queued.fence)
                transfer.copy_seconds += self._clock() - began
        except Exception as error:  # noqa: BLE001 - raised by the caller, once the tier has ended
            transfer.error = error
            return
        transfer.num_chunks = end

    def batched_to_gpu(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("LMCacheEngine is used for stores only")

    to_gpu = from_gpu = batched_to_gpu

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([1, 1, num_tokens, PAGE_BYTES])


class LMCacheEngineAdapter:
    """One rank's CPU tier ``cpu``, with the tiers below it.

    ``copier`` copies between the blocks of ``parts``, in model order, and LMCache's memory. A job
    may name other caches of the same geometries (``QueuedJob.parts``). Closing the engine
    closes ``redis``; ``peers`` stay with their owner. Raises :class:`ConfigError` if LMCache cannot
    start with the settings.
    """

    def __init__(
        self,
        settings: RankSettings,
        parts: Sequence[PagedPart],
        copier: Copier,
        redis: RedisTier | None,
        peers: PeerTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._parts, self._redis, self.copier = clock, parts, redis, copier
        self._piece_bytes = int(settings.config.rank_gib * 2**30 * _PIECE_SHARE)
        self._num_stores = 0
        geometries = PartGeometries(tuple(part.geometry for part in parts))
        names, shared = ChunkNames(settings, geometries), SharedMemory()
        self._blocks = BlockCopyConnector(copier, clock)
        with shared.allocating() if settings.config.host_sharing else nullcontext():
            self._engine = start_engine(settings, names, self._blocks)
        backend = self._engine.storage_manager.storage_backends["LocalCPUBackend"]
        self.cpu = CpuTier(backend, shared, settings, geometries, names.engine_key, clock)
        if peers is not None:
            self.cpu.share.is_away = peers.is_away
        self._remote: RemoteTiers | None = None
        if redis is not None or peers is not None:
            # Late import: it brings blosc2, unused without remote tiers.
            from lmcache_connector.worker.lmcache_remote import RemoteTiers

            self._remote = RemoteTiers(redis, peers, self.cpu)
        self.writes: RedisWrites | None = None
        if redis is not None:
            pace = Pace.for_lifetime(settings.config.redis_ttl_seconds)
            report = settings.report_writes
            self.writes = RedisWrites(redis, self.cpu, pace, clock, report=report)
            self.cpu.ledger.on_noted_use = self.writes.want

    def store(self, job: StoreJob, queued: QueuedJob) -> list[RunTransfer]:
        """Copy out of the paged cache what the CPU tier lacks; blocks the calling thread.

        Chunks that the tier had are reported as events, since the scheduler side may not know of
        them. Chunks go on to Redis as ``job.redis_keys`` says. Chunks that another rank stores, and
        runs that do not pass the gate, are left out. Raises the copy's errors.
        """
        cpu, transfers = self.cpu, []
        for run in job.runs:
            part = (queued.parts or self._parts)[run.part]
            held, elsewhere = cpu.find(run.keys), cpu.is_read_from_owner
            lacking = [i for i, k in enumerate(run.keys) if not (k in held or elsewhere(k))]
            missing = only(run, lacking)
            transfer = RunTransfer(missing, part, queued)
            transfers.append(transfer)
            if missing.keys and not queued.cancelled.is_set():
                num_bytes = len(missing.keys) * part.geometry.chunk_bytes
                sizes = [num_pages(part.geometry)] * len(missing.keys)
                with cpu.expecting(job.claim.tenant, num_bytes), suppress(TransferCancelled):
                    self._engine.store(tokens=missing.keys, offsets=sizes, transfer=transfer)
                self._num_stores += 1
                if self._num_stores % _STORES_BETWEEN_DRAINS == 0:  # LMCache's statistics only grow
                    self._engine.stats_monitor.get_stats_and_clear()
            if self.writes is not None:
                self.writes.write(job, run, held)
        cpu.use(job)
        cpu.announce_ahead()
        return transfers

    def load(self, job: LoadJob, queued: QueuedJob) -> list[RunTransfer]:
        """Copy chunks into the paged cache. After an incomplete run the load ends, and events
        report its missing chunks. Large runs are loaded in pieces, because a prompt may exceed the
        CPU tier.

        A load planned from the CPU tier never asks Redis or peers, even if a chunk was evicted
        meanwhile: a slow Redis must not block the CPU lane. Raises the copy's errors.
        """
        cpu, transfers = self.cpu, list[RunTransfer]()
        for run in job.runs:
            part = (queued.parts or self._parts)[run.part]
            size = max(1, self._piece_bytes // part.geometry.chunk_bytes)
            pieces = in_pieces(run, size, part.blocks_per_chunk)
            transfers += [
                RunTransfer(each, part, queued, queued.deadline, job.source, job.may_fetch)
                for each in pieces
            ]
        cpu.use(job)  # so that fetched chunks evict others
        for transfer in transfers:
            keys = transfer.run.keys
            num_bytes = 0
            if job.may_fetch:
                coming = [k for k in keys if not (cpu.holds(k) or cpu.is_read_from_owner(k))]
                num_bytes = len(coming) * transfer.paged.geometry.chunk_bytes
            with cpu.expecting(job.claim.tenant, num_bytes) if num_bytes else nullcontext():
                self._retrieve(transfer)
            if num_bytes:  # as the tenant's: the next piece evicts chunks of this one
                cpu.use(job)
            if transfer.num_chunks < len(keys):
                first, *others = keys[transfer.num_chunks :]
                # Chunks of other ranks were not asked for, and may still be there.
                cpu.tell([key for key in others if not cpu.is_read_from_owner(key)])
                if not queued.cancelled.is_set():
                    cpu.tell_missed(first)
                break
        if job.may_fetch:
            cpu.announce_ahead()
        return transfers

    def load_in_step(self, job: LoadJob) -> LoadInStep:
        """Copy a job's chunks ahead of the device's next forward pass. Raises ``RuntimeError``,
        before any copy, if a chunk is not in memory; also raises the copy's errors."""
        started, load = self._clock(), LoadInStep(job, self.cpu.get_all(job))
        memory = iter(load.memory)
        try:
            for run in job.runs:
                of_run = list(islice(memory, len(run.keys)))
                addresses = [each.data_ptr for each in of_run]
                copies = self._parts[run.part].copies(run, addresses, of_run, to_chunks=False)
                load.copies.append(self.copier.enqueue(copies))
        except Exception:
            load.release()
            raise
        load.seconds = self._clock() - started
        runs = sorted(job.runs, key=attrgetter("part"))
        self.cpu.note([PrefixUse(job.claim, run.keys) for run in runs])
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
        transfer = RunTransfer(run, part, queued, asks_all=job.may_fetch)
        computed = bytearray(part.geometry.chunk_bytes)
        memory = np.frombuffer(computed, np.uint8)
        copies = part.copies(run, [int(memory.ctypes.data)], memory, to_chunks=True)
        transfer.num_bytes = self.copier.copy(copies, "d2h", queued.fence)
        transfer.compare = lambda stored: compare_chunks(
            memoryview(computed), stored, part.geometry, part.formats, planar=part.is_planar
        )
        is_sound = queued.gate.passes(queued.cancelled)
        has_read()
        if is_sound:
            transfer.deadline = self._clock() + job.deadline_seconds
            self._retrieve(transfer)
            self.cpu.use(job)
        return transfer

    def close(self, seconds: float, *, unmap: bool = True) -> None:
        """Allow ``seconds`` for queued writes to Redis, then drop everything. ``unmap``: see
        :meth:`SharedMemory.close`; ignored if a thread of the Redis tier has not ended."""
        if self._redis is not None and not self._redis.close(seconds):
            logger.warning("A thread of the Redis tier has not ended: memory is kept for it")
            unmap = False
        if not unmap:
            self.cpu.keep_mapped()
        self._engine.close()
        self.cpu.close(unmap=unmap)

    def _retrieve(self, transfer: RunTransfer) -> None:
        keys, copy = transfer.run.keys, partial(self._blocks.copy_in, transfer)
        asks = transfer.asks_all or any(map(self.cpu.is_read_from_owner, keys))
        if self._remote is not None and asks:
            objects = self._remote.load(transfer, copy)
        else:
            found = map(self.cpu.get, keys)
            objects = list(takewhile(lambda memory: memory is not None, found))
        copy(objects)
        for memory in objects:
            memory.ref_count_down()
        if transfer.error is not None and not isinstance(transfer.error, TransferCancelled):
            raise transfer.error
