"""A model of LMCache's engine: its CPU tier, and the order in which it calls what we plug in.

LMCache itself starts event loops and allocates gigabytes. What our worker side relies on is small:
``store``, reference counts, and least recently used chunks leaving first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.simulation import stdlib
from tests.simulation.kernel import SimulationFailure

_POISON = 0xA5


class Chunk:
    """A memory object: one chunk's bytes, and who refers to them."""

    def __init__(self, pool: Pool, data: npt.NDArray[np.uint8]) -> None:
        self.data = data
        self.num_references = 1
        self._pool = pool

    @property
    def data_ptr(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def raw_tensor(self) -> Any:
        """Only its address is asked for. No memory is mapped here."""
        return SimpleNamespace(data_ptr=lambda: self.data_ptr)

    @property
    def byte_array(self) -> npt.NDArray[np.uint8]:
        return self.data

    @property
    def can_evict(self) -> bool:
        return self.num_references == 1

    def get_physical_size(self) -> int:
        return self.data.nbytes

    def ref_count_up(self) -> None:
        if self.num_references <= 0:
            raise SimulationFailure("a reference to a chunk that was given back")
        self.num_references += 1

    def ref_count_down(self) -> None:
        self.num_references -= 1
        if self.num_references < 0:
            raise SimulationFailure("a chunk was given back twice")
        if self.num_references == 0:
            self._pool.take_back(self)


class Pool:
    """Memory of ``num_chunks`` chunks. What was given back must not be written any more."""

    def __init__(self, num_chunks: int, chunk_bytes: int) -> None:
        memory = np.full((num_chunks, chunk_bytes), _POISON, np.uint8)
        self._free = list(memory)
        self.num_chunks = num_chunks
        self._chunk_bytes = chunk_bytes

    @property
    def total_allocated_size(self) -> int:
        """In bytes."""
        return (self.num_chunks - self.num_free) * self._chunk_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Chunk | None:
        if not self._free:
            return None
        data = self._free.pop()
        self._check(data)
        return Chunk(self, data)

    def take_back(self, chunk: Chunk) -> None:
        chunk.data[:] = _POISON
        self._free.append(chunk.data)

    def check(self) -> None:
        for data in self._free:
            self._check(data)

    def _check(self, data: npt.NDArray[np.uint8]) -> None:
        if not (data == _POISON).all():
            raise SimulationFailure("memory was written after it had been given back")


class CpuTier:
    """The calls of LMCache's ``LocalCPUBackend`` that our worker side makes."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.memory_allocator = SimpleNamespace(pin_allocator=pool)
        self.hot_cache: OrderedDict[Any, Chunk] = OrderedDict()
        self.cpu_lock = stdlib.Lock()
        self.cache_policy: Any = None

    def submit_put_task(
        self, key: Any, chunk: Chunk, on_complete_callback: Callable[[Any], None] | None = None
    ) -> None:
        with self.cpu_lock:
            if key in self.hot_cache:
                return
            chunk.ref_count_up()
            self.hot_cache[key] = chunk

    def batched_submit_put_task(
        self, keys: Sequence[Any], chunks: Sequence[Chunk], transfer_spec: Any = None
    ) -> None:
        for key, chunk in zip(keys, chunks, strict=True):
            self.submit_put_task(key, chunk)

    def allocate(self, *_: Any, busy_loop: bool = True, **__: Any) -> Chunk | None:
        while (chunk := self.pool.allocate()) is None:
            with self.cpu_lock:
                victims = self.cache_policy.get_evict_candidates(self.hot_cache, 1)
                if not victims:
                    return None
                self._drop(victims[0])
        return chunk

    def remove(self, key: Any, force: bool = True) -> bool:
        with self.cpu_lock:
            if key not in self.hot_cache:
                return False
            self._drop(key)
            return True

    def _drop(self, key: Any) -> None:
        self.hot_cache.pop(key).ref_count_down()


class EngineModel:
    """The calls of LMCache's ``LMCacheEngine`` that our worker side makes."""

    def __init__(self, database: Any, connector: Any, cpu: CpuTier) -> None:
        self._database = database
        self._connector = connector
        self.cpu = cpu
        self.storage_manager = SimpleNamespace(storage_backends={"LocalCPUBackend": cpu})
        self.stats_monitor = SimpleNamespace(get_stats_and_clear=lambda: None)

    def store(self, tokens: Any, offsets: Any, **kwargs: Any) -> None:
        keys, starts, ends, chunks = [], [], [], list[Chunk]()
        for start, end, key in self._database.process_tokens(tokens, None, offsets):
            chunk = self.cpu.allocate(busy_loop=False)
            if chunk is None:
                break
            keys.append(key)
            starts.append(start)
            ends.append(end)
            chunks.append(chunk)
        if not chunks:
            return
        self._connector.batched_from_gpu(chunks, starts, ends, **kwargs)
        self.cpu.batched_submit_put_task(keys, chunks)
        for chunk in chunks:
            chunk.ref_count_down()

    def close(self) -> None:
        for key in list(self.cpu.hot_cache):
            self.cpu.remove(key)


def start_engine(settings: Any, names: Any, connector: Any) -> EngineModel:
    """Stands in the place of `lmcache_start.start_engine`."""
    _, _, num_pages, _, page_bytes = names.metadata.kv_shape
    chunk_bytes = num_pages * page_bytes
    cpu = CpuTier(Pool(max(1, round(settings.config.rank_gib * 2**30 / chunk_bytes)), chunk_bytes))
    return EngineModel(names, connector, cpu)
