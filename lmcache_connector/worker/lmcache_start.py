"""Starts LMCache's engine without side effects on the process (usually vLLM's worker), in memory
that other processes of this host may map read-only.

LMCache allocates its CPU tier in one piece. If it is shared, that piece is a memfd: it has no name,
so nothing is left behind, and needs no room in ``/dev/shm``. Memory that LMCache pins for a GPU is
not shared: see docs/architecture.md.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import logging
import mmap
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1 import memory_management
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.token_database import TokenDatabase

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.errors import ConfigError
from lmcache_connector.kv_layout.topology import PartLayout
from lmcache_connector.kv_parts.owners import Owners
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""LMCache's unit of allocation, described to it as a token: parts have chunks of several sizes, and
a chunk ends inside its last page."""

# No shrinking, no growing, and new mappings are read-only.
_SEALS = 0x2 | 0x4 | 0x10
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
# Python's mmap object could not be unmapped while LMCache has tensors on it.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value
_starting = threading.Lock()

# Per logger, the start of warnings that LMCache logs during normal work, such as one per stored
# chunk when the tier is full.
_ORDINARY = {
    "lmcache.v1.memory_management": "Failed to allocate memory block",
    "lmcache.v1.storage_backend": "The 'memory_allocator' argument is deprecated",
    "lmcache.v1.storage_backend.local_cpu_backend": "Controller message sender is not initialized",
}


def _is_extraordinary(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_ORDINARY[record.name])


for _name in _ORDINARY:
    logging.getLogger(_name).addFilter(_is_extraordinary)

_METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of one rank.

    ``config``: fitted to the model. ``owners``: which rank stores KV that several ranks hold;
    ``None``: this rank stores all of its own. ``announces``: tell the scheduler side of evictions
    before they happen. ``report_writes``: record chunks written to Redis. ``probe_keys``: chunks
    that measure Redis; empty: Redis is not measured.

    In vLLM's engines: ``parts`` are the model's, ``configuration`` is that of :class:`RankStart`.
    ``blocks_are_zeroed``: see :class:`StepGate`. ``finishes_stores``: complete all copies out of
    the paged cache in each step. ``loads``: this instance also loads.
    """

    config: ConnectorConfig
    rank: int = 0
    world_size: int = 1
    owners: Owners | None = None
    announces: bool = False
    report_writes: bool = False
    probe_keys: Sequence[bytes] = ()
    parts: tuple[PartLayout, ...] = ()
    configuration: tuple[tuple[str, str], ...] = ()
    blocks_are_zeroed: bool = False
    finishes_stores: bool = False
    loads: bool = True


class ChunkNames(TokenDatabase):
    """Names chunks by the keys of the plan, which LMCache gets in place of tokens: the scheduler
    side has hashed the tokens. Hashing again would cost time and could disagree.

    A chunk is described to LMCache as plain bytes: one layer and one head, a page wide.
    ``offsets`` of a store are the pages of each chunk.
    """

    def __init__(self, settings: RankSettings, geometries: PartGeometries) -> None:
        # The base initialiser would re-seed vLLM's own block hashes in this process.
        num_tokens = num_pages(geometries.largest)
        self.metadata = LMCacheMetadata(
            model_name="chunk",  # the model is part of the chunk key
            world_size=settings.world_size,
            local_world_size=settings.world_size,
            worker_id=settings.rank,
            local_worker_id=settings.rank,
            kv_dtype=torch.uint8,
            kv_shape=(1, 1, num_tokens, 1, PAGE_BYTES),
            use_mla=False,
            role="worker",
            chunk_size=num_tokens,
        )
        self.save_only_first_rank = False

    def process_tokens(
        self, tokens: Sequence[bytes], hashes: None, offsets: Sequence[int], *_: Any, **__: Any
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        end = 0
        for key, num_tokens in zip(tokens, offsets, strict=True):
            start, end = end, end + num_tokens
            yield start, end, self.engine_key(key)

    def engine_key(self, key: bytes) -> CacheEngineKey:
        return self._make_key_by_hash(int.from_bytes(key, "big"))


def num_pages(geometry: ChunkGeometry) -> int:
    return -(-geometry.chunk_bytes // PAGE_BYTES)


def start_engine(
    settings: RankSettings, names: ChunkNames, connector: GPUConnectorInterface
) -> LMCacheEngine:
    """Raises :class:`ConfigError` if LMCache cannot allocate the CPU tier."""
    rank_gib, own = settings.config.rank_gib, settings.config.lmcache
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=names.metadata.chunk_size,
        local_cpu=True,
        max_local_cpu_size=rank_gib,
        save_unfull_chunk=False,
        cache_policy="LRU",  # replaced by ours
        py_enable_gc=True,  # else LMCache disables garbage collection in the whole process
        lmcache_instance_id=f"rank-{settings.rank}",
        **own,
    )
    _let_vllm_start_again()
    with _process_settings_kept():
        engine = LMCacheEngine(
            config, names.metadata, names, connector, _no_broadcast, _no_broadcast
        )
        try:
            _in_daemon_thread(engine.post_init)
        except (AssertionError, RuntimeError) as error:
            others = "".join(f" and lmcache.{name}" for name in own)
            raise ConfigError(
                f"LMCache cannot allocate a CPU tier of {rank_gib:g} GiB per rank, from "
                f"cpu_gib{others}: {error}"
            ) from error
    return engine


@contextmanager
def _process_settings_kept() -> Iterator[None]:
    """Undo LMCache's changes to the process, which is vLLM's.

    LMCache forces the start method "spawn", and sets ``PROMETHEUS_MULTIPROC_DIR`` to one folder for
    all engines of the machine: servers started from here would add up each other's metrics.
    """
    start_method = multiprocessing.get_start_method(allow_none=True)
    metrics_folder = os.environ.get(_METRICS_FOLDER)
    try:
        yield
    finally:
        multiprocessing.set_start_method(start_method, force=True)
        if metrics_folder is None:
            os.environ.pop(_METRICS_FOLDER, None)


def _let_vllm_start_again() -> None:
    """Fix later engine starts in this process. At start, vLLM's CPU build reads the ``__dict__`` of
    every object in every module. LMCache imports numba, and with it a llvmlite object that answers
    any attribute name, ``__dict__`` too, with something that is no dictionary."""
    with suppress(ImportError, AttributeError):  # llvmlite may have changed
        llvm = importlib.import_module("llvmlite.binding.ffi").lib
        llvm._fntab.setdefault("__dict__", {})  # the table of its answers


def _in_daemon_thread(function: Callable[[], None]) -> None:
    """Call ``function`` on a daemon thread, so that LMCache's threads become daemons too. Otherwise
    they would keep alive a process that ends without closing its engine."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    raised: list[Exception] = []

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            function()
        except Exception as error:  # noqa: BLE001 - raised again by the caller's thread
            raised.append(error)

    thread = start_thread("lmc-init", run)
    thread.join()
    if raised:
        _stop_loop(raised[0])
        raise raised[0]


def _stop_loop(error: BaseException) -> None:
    """End LMCache's thread after a failed start; only the frames of ``error`` refer to it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(manager := frame.f_locals.get("self"), StorageManager):
            manager.loop.call_soon_threadsafe(manager.loop.stop)
            manager.thread.join()


def _no_broadcast(*_: Any, **__: Any) -> None:
    raise RuntimeError("ranks of this connector never broadcast through LMCache")


class SharedMemory:
    """The memory of one CPU tier. ``descriptor``: ``None`` before allocation, or if the memory
    cannot be shared."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._base = self._size = 0

    def offset_of(self, tensor: torch.Tensor) -> int:
        return int(tensor.data_ptr()) - self._base

    def close(self, *, unmap: bool) -> None:
        """``unmap``: free the memory, which nothing uses any more. Otherwise it stays mapped until
        the process ends, so that threads left behind do not crash. Other processes' mappings stay
        until they unmap."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
            if unmap:
                _LIBC.munmap(self._base, self._size)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Make LMCache allocate its CPU tier from this memory inside the ``with``, which frees it
        again if it raises."""
        original = memory_management._allocate_cpu_memory

        def allocate(size: int, *args: Any, **more: Any) -> torch.Tensor:
            special = [each for each in (*args, *more.values()) if each]
            if not size or special or self.descriptor is not None or torch.cuda.is_available():
                return original(size, *args, **more)
            try:
                return self._allocate(size)
            except OSError as error:
                logger.warning("Other engines must read this CPU tier over a socket: %s", error)
                return original(size, *args, **more)

        with _starting:
            memory_management._allocate_cpu_memory = allocate
            try:
                yield
            except BaseException:
                self.close(unmap=True)
                raise
            finally:
                memory_management._allocate_cpu_memory = original

    def _allocate(self, size: int) -> torch.Tensor:
        descriptor = os.memfd_create("lmcache-connector", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            address = _LIBC.mmap(None, size, _READ_WRITE, mmap.MAP_SHARED, descriptor, 0)
            if address in (None, _MAP_FAILED):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor, self._base, self._size = descriptor, address, size
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
