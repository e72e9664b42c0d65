"""Memory of the CPU tier that other processes of this host may map read-only.

LMCache allocates its CPU tier in one piece. This module makes that piece a memfd: it has no name,
so nothing is left behind, and needs no room in ``/dev/shm``. If LMCache pins its memory for a GPU,
the memory is not shared: see docs/architecture.md.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lmcache.v1 import memory_management
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

logger = logging.getLogger(__name__)

_F_ADD_SEALS = 1033
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
        """Make LMCache allocate its CPU tier from this memory inside the ``with``."""
        original = memory_management._allocate_cpu_memory

        def allocate(size: int, *args: Any, **more: Any) -> torch.Tensor:
            special = [each for each in (*args, *more.values()) if each]
            if not size or special or self.descriptor is not None or torch.cuda.is_available():
                return original(size, *args, **more)
            try:
                return self._allocate(size)
            except OSError as error:
                logger.warning("Other engines here read the CPU tier over a socket: %s", error)
                return original(size, *args, **more)

        with _starting:
            memory_management._allocate_cpu_memory = allocate
            try:
                yield
            finally:
                memory_management._allocate_cpu_memory = original

    def keep(self, cpu: LocalCPUBackend) -> None:
        """Keep LMCache from freeing memory that it has not allocated."""
        if self.descriptor is not None:
            cpu.memory_allocator._unregistered = True

    def _allocate(self, size: int) -> torch.Tensor:
        descriptor = os.memfd_create("lmcache-connector", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            address = _LIBC.mmap(None, size, _READ_WRITE, mmap.MAP_SHARED, descriptor, 0)
            if address in (None, _MAP_FAILED):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor, self._base, self._size = descriptor, address, size
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
