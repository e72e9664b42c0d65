"""Components plugged into LMCache's engine: token database, GPU connector, eviction policy.

:mod:`lmcache_connector.worker.lmcache_engine` shows how they work together.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.token_database import TokenDatabase

from lmcache_connector.copy_kv_blocks.copier import Copier, QueuedCopy
from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.net.deadline import never
from lmcache_connector.plans import (
    Fetched,
    JobResult,
    LayerDifference,
    LoadJob,
    Outcome,
    PartRun,
    PeerSource,
    Tier,
)
from lmcache_connector.retention.ledger import Ledger
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.worker.paged_part import PagedPart, piece
from lmcache_connector.worker.waiting_jobs import QueuedJob

UNIT_BYTES = 4096
"""Page size of LMCache's memory."""


@dataclass(frozen=True)
class ValueSizes:
    """Sizes of values as LMCache counts them: in tokens of equal size.

    A model of one part has chunks of ``num_tokens``. Values of several parts differ in size, so a
    "token" is a page there, and a value ends inside its last page.
    """

    geometries: PartGeometries

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes of one "token" of LMCache's."""
        if len(self.geometries) == 1:
            return self.geometries.largest.bytes_per_token
        return UNIT_BYTES

    def num_units(self, geometry: ChunkGeometry) -> int:
        return -(-geometry.chunk_bytes // self.unit_bytes)

    def shape(self, geometry: ChunkGeometry) -> torch.Size:
        return torch.Size([1, 1, self.num_units(geometry), self.unit_bytes])


@dataclass(slots=True)
class LoadInStep:
    """A load that the next forward pass reads: copies that the host has made, or the device makes
    before that pass, and references to the memory of their chunks. ``seconds``: of the call."""

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
    """One run of a job on its way through LMCache to the GPU connector, and its result.

    ``paged``: the cache to copy from or to. ``on_copied`` gets the memory of a store's chunks, in
    order, once they are there. A load with ``compare`` goes into no blocks: ``compare`` gets a
    tier's copy of its one chunk. Results: ``num_bytes`` copied, ``num_chunks`` leading chunks, the
    part of both that was ``fetched``, ``copy_seconds`` of a load, ``differences`` of an audit.
    """

    run: PartRun
    paged: PagedPart
    queued: QueuedJob
    on_copied: Callable[[Sequence[MemoryObj]], None] = lambda objects: None
    compare: Callable[[memoryview], tuple[LayerDifference, ...]] | None = None
    num_bytes: int = 0
    num_chunks: int = 0
    copy_seconds: float = 0.0
    fetched: tuple[Fetched, ...] = ()
    differences: tuple[LayerDifference, ...] = ()
    error: Exception | None = None


def by_tier(fetches: Iterable[Fetched]) -> Iterator[Fetched]:
    """One sum per tier."""
    found: dict[Tier, list[Fetched]] = {}
    for each in fetches:
        found.setdefault(each.tier, []).append(each)
    for tier, of_tier in found.items():
        yield Fetched(
            tier,
            sum(each.num_bytes for each in of_tier),
            sum(each.seconds for each in of_tier),
            any(each.has_failed for each in of_tier),
        )


@dataclass(slots=True)
class LoadContext:
    """The limits of one load, and its results.

    ``deadline`` is a reading of the tier's clock, in seconds. ``source``: the only instance to read
    from; if trusted, its values stay in the CPU tier. Without ``asks_all``, the load reads only
    chunks that other ranks of this engine store for this rank. ``on_arrival`` gets the leading
    chunks so far, while others are still read. ``fetched``: one entry per tier.
    """

    deadline: float
    cancelled: Callable[[], bool] = never
    source: PeerSource | None = None
    asks_all: bool = True
    on_arrival: Callable[[list[MemoryObj]], None] = lambda objects: None
    fetched: list[Fetched] = field(default_factory=list)


class TransferCancelled(Exception):
    """vLLM took a store's blocks back while it ran: the copies are void."""


@dataclass(frozen=True, slots=True)
class PlannedTokens(Sequence[int]):
    """Chunks of one part in place of token ids: ``num_units`` LMCache tokens and a key each.

    The scheduler side has hashed the tokens. Hashing again would cost time and could disagree.
    """

    keys: Sequence[bytes]
    num_units: int

    def __len__(self) -> int:
        return len(self.keys) * self.num_units

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("planned tokens have keys, not ids")


class PlannedTokenDatabase(TokenDatabase):
    """Names chunks by the keys of the plan."""

    def __init__(self, metadata: LMCacheMetadata) -> None:
        # The base initialiser would re-seed vLLM's own block hashes in this process.
        self.metadata = metadata
        self.save_only_first_rank = False

    def process_tokens(
        self, tokens: PlannedTokens, *_: Any, **__: Any
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        size = tokens.num_units
        for index, key in enumerate(tokens.keys):
            yield index * size, (index + 1) * size, self.engine_key(key)

    def engine_key(self, key: bytes) -> CacheEngineKey:
        return self._make_key_by_hash(int.from_bytes(key, "big"))


class BlockCopyConnector(GPUConnectorInterface):
    """Copies the chunks of a run between LMCache's memory and the paged cache in one call."""

    def __init__(self, sizes: ValueSizes, copier: Copier, clock: Callable[[], float]) -> None:
        self._sizes = sizes
        self._copier = copier
        self._clock = clock

    def batched_from_gpu(
        self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Raises the copy's errors, or :class:`TransferCancelled`; then nothing is stored."""
        transfer: RunTransfer = kwargs["transfer"]
        tail_tokens = transfer.run.tail_tokens  # a tail is a store of its own, of one chunk
        try:
            addresses = [obj.data_ptr for obj in memory_objs]
            if tail_tokens:  # without a tail the copy fills the value
                geometry = transfer.paged.geometry
                value = np.frombuffer(value_bytes(memory_objs[0], geometry), np.uint8)
                value[:] = 0
            copies = transfer.paged.copies(transfer.run, addresses, memory_objs, to_chunks=True)
            transfer.num_bytes = self._copier.copy(copies, "d2h", transfer.queued.fence)
            if tail_tokens:
                transfer.paged.clear_after(tail_tokens, value)
            if not transfer.queued.gate.passes(transfer.queued.cancelled):
                raise TransferCancelled
            transfer.on_copied(memory_objs)
        except Exception:
            for memory_obj in memory_objs:  # LMCache forgets them when this call raises
                memory_obj.ref_count_down()
            raise
        transfer.num_chunks = len(memory_objs)

    def copy_in(self, transfer: RunTransfer, memory_objs: Sequence[MemoryObj]) -> None:
        """Copy those of the run's leading chunks that were not copied yet. Never raises, because a
        tier calls this while it still reads: see ``transfer.error``."""
        start, end = transfer.num_chunks, len(memory_objs)
        if transfer.error is not None or start == end:
            return
        if transfer.queued.cancelled.is_set():
            transfer.error = TransferCancelled()
            return
        try:
            if transfer.compare is not None:
                (memory,) = memory_objs
                stored = value_bytes(memory, transfer.paged.geometry)
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

    def enqueue(self, load: LoadInStep, parts: Sequence[PagedPart]) -> None:
        """Copy all of a job's chunks ahead of the next forward pass. Raises the copy's errors."""
        memory = iter(load.memory)
        for run in load.job.runs:
            of_run = list(islice(memory, len(run.keys)))
            addresses = [each.data_ptr for each in of_run]
            copies = parts[run.part].copies(run, addresses, of_run, to_chunks=False)
            load.copies.append(self._copier.enqueue(copies))

    def copy_out(self, transfer: RunTransfer, memory: npt.NDArray[np.uint8]) -> None:
        """Copy the run's one chunk into ``memory``. Raises the copy's errors."""
        address = int(memory.ctypes.data)
        copies = transfer.paged.copies(transfer.run, [address], memory, to_chunks=True)
        transfer.num_bytes = self._copier.copy(copies, "d2h", transfer.queued.fence)

    def batched_to_gpu(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("LMCacheEngine only stores")

    to_gpu = from_gpu = batched_to_gpu

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([1, 1, num_tokens, self._sizes.unit_bytes])


def value_bytes(memory: MemoryObj, geometry: ChunkGeometry) -> memoryview:
    """A view of the value in the object's bytes, without the rest of its last page."""
    return memoryview(memory.byte_array).cast("B")[: geometry.chunk_bytes]


class ChunkTable(UserDict[CacheEngineKey, MemoryObj]):
    """The chunks of LMCache's CPU tier. Tells the ledger of every chunk added or removed, and
    ``on_change`` its key once that is done."""

    def __init__(self, ledger: Ledger, on_change: Callable[[bytes], None]) -> None:
        super().__init__()
        self._ledger = ledger
        self._on_change = on_change

    def __setitem__(self, key: CacheEngineKey, memory: MemoryObj) -> None:
        name = chunk_key_of(key)
        self.data[key] = memory
        self._ledger.admit(name, memory.get_physical_size())
        self._on_change(name)

    def __delitem__(self, key: CacheEngineKey) -> None:
        name = chunk_key_of(key)
        self._ledger.drop(name, self.data.pop(key))
        self._on_change(name)


class LedgerPolicy(BaseCachePolicy[CacheEngineKey, ChunkTable]):
    """The ledger chooses what LMCache's CPU tier evicts. LMCache calls it under the tier's lock."""

    def __init__(
        self,
        ledger: Ledger,
        engine_key: Callable[[bytes], CacheEngineKey],
        on_change: Callable[[bytes], None] = lambda key: None,
    ) -> None:
        """``on_change``: see :class:`ChunkTable`."""
        self._ledger = ledger
        self._engine_key = engine_key
        self._on_change = on_change

    def install(self, cpu: LocalCPUBackend) -> None:
        """Replace LMCache's policy while the tier is still empty."""
        with cpu.cpu_lock:
            cpu.cache_policy, cpu.hot_cache = self, self.init_mutable_mapping()

    def init_mutable_mapping(self) -> ChunkTable:
        return ChunkTable(self._ledger, self._on_change)

    def update_on_hit(self, key: CacheEngineKey, cache_dict: ChunkTable) -> None:
        """Nothing: the engine adapter reports each job's chunks in prompt order."""

    def update_on_put(self, key: CacheEngineKey) -> None:
        """Nothing: `ChunkTable` has told the ledger."""

    def update_on_force_evict(self, key: CacheEngineKey) -> None:
        """Nothing: `ChunkTable` has told the ledger."""

    def get_evict_candidates(
        self, cache_dict: ChunkTable, num_candidates: int = 1
    ) -> list[CacheEngineKey]:
        """``num_candidates`` keys, or none: see :meth:`Ledger.evict`."""
        victims = self._ledger.evict(num_candidates, partial(self._may_go, cache_dict))
        return [self._engine_key(key) for key in victims]

    def announce(self, cache_dict: ChunkTable, count: int) -> None:
        """Announce the next candidates. The caller holds the tier's lock."""
        self._ledger.announce(count, partial(self._may_go, cache_dict))

    def _may_go(self, cache_dict: ChunkTable, key: bytes) -> bool:
        return bool(cache_dict[self._engine_key(key)].can_evict)


def chunk_key_of(key: CacheEngineKey) -> bytes:
    """The chunk key, which the token database passes to LMCache as an integer."""
    return int(key.chunk_hash).to_bytes(CHUNK_KEY_BYTES, "big")
