"""The chunks of LMCache's CPU tier, leased to peers by a peer server."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.storage.geometry import PartGeometries, Stripe
from lmcache_connector.worker.lmcache_memory import SharedMemory
from lmcache_connector.worker.lmcache_plugs import PlannedTokenDatabase, chunk_key_of, value_bytes

_HEADERS = "lmcache_connector_headers"


@dataclass(frozen=True, slots=True)
class ChunkLease:
    """A reference to a memory object, which LMCache therefore does not evict."""

    view: memoryview
    memory: MemoryObj
    offset: int

    @property
    def headers(self) -> dict[Stripe, bytes]:
        """Kept on the memory object, which LMCache creates anew for each chunk."""
        found: dict[Stripe, bytes] = vars(self.memory).setdefault(_HEADERS, {})
        return found

    def release(self) -> None:
        self.memory.ref_count_down()


class CpuTierChunks:
    """Thread-safe: leasing and listing take LMCache's lock. ``geometries`` and ``share``: this
    rank's. A chunk enters the tier when its store has copied it."""

    def __init__(
        self,
        cpu: LocalCPUBackend,
        database: PlannedTokenDatabase,
        geometries: PartGeometries,
        shared: SharedMemory,
        share: Share,
    ) -> None:
        self.is_read_from_owner = share.is_read_from_owner
        self._shared = shared
        self._cpu = cpu
        self._database = database
        self._geometries = geometries

    @property
    def memory(self) -> int | None:
        return self._shared.descriptor

    def holds(self, key: bytes) -> bool:
        return self._database.engine_key(key) in self._cpu.hot_cache

    def lease(self, key: bytes) -> ChunkLease | None:
        """Raises ``ValueError`` for a key that names no part of the model."""
        memory = self._cpu.get_blocking(self._database.engine_key(key))
        if memory is None:
            return None
        view = value_bytes(memory, self._geometries.of(key)).toreadonly()
        return ChunkLease(view, memory, self._shared.offset_of(memory.raw_tensor))

    def all_keys(self) -> list[bytes]:
        with self._cpu.cpu_lock:
            return [chunk_key_of(key) for key in self._cpu.hot_cache]
