"""Memory of the CPU tier that other processes of this host may map, for reading only.

LMCache allocates its CPU tier in one piece. While an engine is made here, that piece is a memfd:
it has no name, so nothing is left behind, and needs no room in ``/dev/shm``. Where LMCache pins its
memory for a GPU, it goes on doing so, and nothing is mapped: see docs/architecture.md.
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
# It neither shrinks nor grows, and new mappings are for reading only.
_SEALS = 0x2 | 0x4 | 0x10
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
# Python's mmap is not unmapped while LMCache has tensors of it.
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
    """The memory of one CPU tier. ``descriptor``: ``None`` until it is allocated, or where it
    cannot be shared."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._base = self._size = 0

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Of a tensor in it."""
        return int(tensor.data_ptr()) - self._base

    def close(self, *, unmap: bool) -> None:
        """``unmap``: nothing uses it any more; else it stays as long as the process, since a thread
        that was left behind would end that. What others have mapped stays until they let go."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
            if unmap:
                _LIBC.munmap(self._base, self._size)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """What LMCache allocates for its CPU tier in here is this memory."""
        original = memory_management._allocate_cpu_memory

        def allocate(size: int, *args: Any, **more: Any) -> torch.Tensor:
            special = [each for each in (*args, *more.values()) if each]
            if not size or special or self.descriptor is not None or torch.cuda.is_available():
                return original(size, *args, **more)
            try:
                return self._allocate(size)
            except OSError as error:
                logger.warning("Others of this host read the CPU tier by a socket: %s", error)
                return original(size, *args, **more)

        with _starting:
            memory_management._allocate_cpu_memory = allocate
            try:
                yield
            finally:
                memory_management._allocate_cpu_memory = original

    def keep(self, cpu: LocalCPUBackend) -> None:
        """LMCache shall not free what it has not allocated."""
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
