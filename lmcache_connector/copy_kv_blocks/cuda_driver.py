"""The few calls of the CUDA driver that PyTorch does not offer.

Every call releases the GIL. Names and types: CUDA driver API, sections "Memory Management" and
"Driver Entry Point Access".
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

import numpy as np

from lmcache_connector.kv_layout.paged_cache import Int64s

_BATCH_SINCE_CUDA = 12080
"""``cuMemcpyBatchAsync`` with the arguments of CUDA 12.8; later drivers keep that entry point."""
_SRC_ACCESS_ORDER_STREAM = 1


class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_uint), ("id", c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("src_access_order", c_uint),
        ("src_location_hint", _Location),
        ("dst_location_hint", _Location),
        ("flags", c_uint),
    )


class CudaDriver:
    """Copies between addresses of one device and host memory, ordered by a stream."""

    def __init__(self, device_index: int) -> None:
        """Hold the device's primary context, which is the one PyTorch uses."""
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.cuMemcpyAsync.argtypes = (c_uint64, c_uint64, c_size_t, c_void_p)
        self._library.cuCtxSetCurrent.argtypes = (c_void_p,)
        self._device = c_int()
        self._context = c_void_p()
        self._check(self._library.cuInit(0))
        self._check(self._library.cuDeviceGet(byref(self._device), c_int(device_index)))
        self._check(self._library.cuDevicePrimaryCtxRetain(byref(self._context), self._device))
        self._batch = self._find_batch()

    def close(self) -> None:
        self._check(self._library.cuDevicePrimaryCtxRelease_v2(self._device))

    def bind(self) -> None:
        """Make the device's context current on the calling thread; new threads have none."""
        self._check(self._library.cuCtxSetCurrent(self._context))

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        """Start one copy; the addresses tell its direction."""
        self._check(self._library.cuMemcpyAsync(dst, src, num_bytes, stream))

    def copy_many(self, dst: Int64s, src: Int64s, num_bytes: Int64s, stream: int) -> None:
        """Start many copies with one call where the driver has it (CUDA 12.8)."""
        if len(dst) == 0:
            return
        if self._batch is None:
            for to, start, size in zip(dst.tolist(), src.tolist(), num_bytes.tolist(), strict=True):
                self.copy(to, start, size, stream)
            return
        attributes = _CopyAttributes(src_access_order=_SRC_ACCESS_ORDER_STREAM)
        first, failed = c_size_t(0), c_size_t(0)
        dst, src, num_bytes = (np.ascontiguousarray(array) for array in (dst, src, num_bytes))
        self._check(
            self._batch(
                dst.ctypes.data,
                src.ctypes.data,
                num_bytes.ctypes.data,
                len(dst),
                byref(attributes),
                byref(first),
                1,
                byref(failed),
                stream,
            )
        )

    def _find_batch(self) -> ctypes._CFuncPtr | None:  # type: ignore[name-defined]
        address, status = c_void_p(), c_int()
        result = self._library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync",
            byref(address),
            c_int(_BATCH_SINCE_CUDA),
            c_uint64(0),
            byref(status),
        )
        if result != 0 or not address.value:
            return None
        pointers = (c_void_p,) * 3
        kind = ctypes.CFUNCTYPE(
            c_int,
            *pointers,
            c_size_t,
            POINTER(_CopyAttributes),
            POINTER(c_size_t),
            c_size_t,
            POINTER(c_size_t),
            c_void_p,
        )
        return kind(address.value)

    def _check(self, result: int) -> None:
        if result == 0:
            return
        message = ctypes.c_char_p()
        self._library.cuGetErrorString(c_int(result), byref(message))
        text = message.value.decode() if message.value else "unknown error"
        raise CudaError(f"CUDA driver error {result}: {text}")
