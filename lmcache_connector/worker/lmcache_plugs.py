"""What plugs into LMCache's engine: names of chunks, one copy per job, and its events.

:mod:`lmcache_connector.worker.lmcache_engine` says how they fit together.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_controller.message import OpType
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import TokenDatabase

from lmcache_connector.copy_kv_blocks.copier import Copier, Fence, copy_kv_blocks
from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import PagedLayout
from lmcache_connector.plans import CacheEvent, LayerDifference
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.worker.step_gate import StepGate


@dataclass(slots=True)
class JobTransfer:
    """One job on its way through LMCache to the GPU connector, and what came of it.

    ``num_bytes`` were copied from or to the paged cache, ``num_chunks`` leading chunks arrived.
    ``redis_bytes`` came from Redis in ``redis_seconds``; ``redis_failed``: too slow, or broken.
    """

    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    skip_blocks: int
    fence: Fence | None
    cancelled: threading.Event
    gate: StepGate = field(default_factory=StepGate)
    num_bytes: int = 0
    num_chunks: int = 0
    redis_bytes: int = 0
    redis_seconds: float = 0.0
    redis_failed: bool = False
    error: Exception | None = None


@dataclass(slots=True)
class Comparison(JobTransfer):
    """A load that fills no blocks: ``compare(stored)`` is handed what a tier holds of one chunk."""

    compare: Callable[[memoryview], tuple[LayerDifference, ...]] | None = None
    differences: tuple[LayerDifference, ...] = ()


class TransferCancelled(Exception):
    """The blocks of a store were taken back while it ran: what it read is worthless."""


class PlannedTokens(Sequence[int]):
    """A job's tokens where LMCache wants token ids: their number, and the keys of their chunks.

    The scheduler side has hashed them. Hashing again here would cost time and could disagree.
    """

    def __init__(self, keys: Sequence[bytes], chunk_size: int) -> None:
        self.keys = keys
        self._chunk_size = chunk_size

    def __len__(self) -> int:
        return len(self.keys) * self._chunk_size

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
        size = self.metadata.chunk_size
        for index, key in enumerate(tokens.keys):
            yield index * size, (index + 1) * size, self.engine_key(key)

    def engine_key(self, key: bytes) -> CacheEngineKey:
        return self._make_key_by_hash(int.from_bytes(key, "big"))


class BlockCopyConnector(GPUConnectorInterface):
    """Moves the chunks of a job between LMCache's memory and the paged cache in one call."""

    def __init__(
        self, paged: PagedLayout, geometry: ChunkGeometry, block_size: int, copier: Copier
    ) -> None:
        self._paged = paged
        self._geometry = geometry
        self._block_size = block_size
        self._copier = copier

    def batched_from_gpu(
        self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Raises what the copy raises, or :class:`TransferCancelled`; then nothing is stored."""
        transfer: JobTransfer = kwargs["transfer"]
        try:
            chunks = self._chunks(memory_objs)
            block_ids = transfer.block_ids[: chunks.num_blocks]
            transfer.num_bytes = copy_kv_blocks(
                self._paged,
                chunks,
                block_ids,
                range(len(block_ids)),
                "d2h",
                self._copier,
                transfer.fence,
            )
            if not transfer.gate.passes(transfer.cancelled):
                raise TransferCancelled
        except Exception:
            for memory_obj in memory_objs:  # LMCache forgets them when this call raises
                memory_obj.ref_count_down()
            raise
        transfer.num_chunks = len(memory_objs)

    def batched_to_gpu(
        self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Never raises: LMCache would keep its references. What went wrong is in the transfer."""
        transfer: JobTransfer = kwargs["transfer"]
        if transfer.cancelled.is_set():
            transfer.error = TransferCancelled()
            return
        try:
            if isinstance(transfer, Comparison):
                self._compare(memory_objs, transfer)
                return
            chunks = self._chunks(memory_objs)
            source = range(transfer.skip_blocks, chunks.num_blocks)
            block_ids = transfer.block_ids[: len(source)]
            transfer.num_bytes = copy_kv_blocks(
                chunks,
                self._paged,
                source[: len(block_ids)],
                block_ids,
                "h2d",
                self._copier,
                transfer.fence,
            )
        except Exception as error:  # noqa: BLE001 - reported by the caller, after LMCache cleaned up
            transfer.error = error
            return
        transfer.num_chunks = len(memory_objs)

    def copy_out(self, transfer: JobTransfer, memory: npt.NDArray[np.uint8]) -> None:
        """Copy the job's one chunk out of the paged cache into ``memory``. Raises what the copy
        raises."""
        address = int(memory.ctypes.data)
        planes = self._paged.planes
        chunk = ChunkBuffers(self._geometry, self._block_size, [address], memory, planes=planes)
        transfer.num_bytes = copy_kv_blocks(
            self._paged,
            chunk,
            transfer.block_ids,
            range(len(transfer.block_ids)),
            "d2h",
            self._copier,
            transfer.fence,
        )

    def _compare(self, memory_objs: list[MemoryObj], transfer: Comparison) -> None:
        assert transfer.compare is not None
        (memory_obj,) = memory_objs
        transfer.differences = transfer.compare(memoryview(memory_obj.byte_array).cast("B"))
        transfer.num_chunks = 1

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([1, 1, num_tokens, self._geometry.bytes_per_token])

    def _chunks(self, memory_objs: list[MemoryObj]) -> ChunkBuffers:
        return ChunkBuffers(
            self._geometry,
            self._block_size,
            [obj.data_ptr for obj in memory_objs],
            memory_objs,
            planes=self._paged.planes,
        )


class EventSink:
    """Stands where LMCache's CPU tier expects its controller's message sender."""

    def __init__(self) -> None:
        self._events: deque[CacheEvent] = deque()

    def add_kv_op(self, op_type: OpType, key: int) -> None:
        self._events.append(
            CacheEvent(key.to_bytes(CHUNK_KEY_BYTES, "big"), op_type is OpType.ADMIT)
        )

    def confirm(self, keys: Iterable[bytes]) -> None:
        """Report again that these are there: LMCache may report an eviction too late."""
        self._events.extend(CacheEvent(key, admitted=True) for key in keys)

    def close(self) -> None:
        """Nothing to stop: there is no thread."""

    @property
    def has_news(self) -> bool:
        return bool(self._events)

    def take(self) -> tuple[CacheEvent, ...]:
        return tuple(self._events.popleft() for _ in range(len(self._events)))
