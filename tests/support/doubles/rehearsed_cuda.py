"""CUDA's copier on a machine without a GPU: what it will do there is run here, line by line.

Host memory plays the device's. Streams keep order by doing everything at once, the driver's copies
are memmoves, and Triton's interpreter runs the kernel: TRITON_INTERPRET=1 must be set before Triton
is loaded. Nothing here says how fast anything is, or that streams wait for each other as they must.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_connector.kv_layout.paged_cache import Int64s

HOST = torch.device("cpu")


def is_rehearsal() -> bool:
    """Whether this process was told to do without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class HostStream:
    """Whatever it is given is done at once."""

    cuda_stream = 0

    def __init__(self, device: object = None) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class HostEvent:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: object) -> float:
        return 0.0


class HostDriver:
    """Stands for ``CudaDriver``."""

    def __init__(self, device_index: int) -> None: ...

    def bind(self) -> None: ...

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        ctypes.memmove(dst, src, num_bytes)

    def copy_many(self, dst: Int64s, src: Int64s, num_bytes: Int64s, stream: int) -> None:
        for to, start, size in zip(dst.tolist(), src.tolist(), num_bytes.tolist(), strict=True):
            self.copy(to, start, size, stream)

    def close(self) -> None: ...


class _HostTorch:
    """torch, with the host in the part of the device."""

    cuda = SimpleNamespace(
        Stream=HostStream,
        Event=HostEvent,
        current_device=lambda: 0,
        current_stream=HostStream,
        device=lambda _: contextlib.nullcontext(),
        stream=lambda _: contextlib.nullcontext(),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: object) -> torch.device:
        return HOST

    def empty(self, *size: int, dtype: torch.dtype, **_: object) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype)


def cuda_copier(**options: int) -> Any:
    """A ``CudaCopier`` with these options, of the first GPU or rehearsed. Else the test that wants
    it is skipped, or fails where REQUIRE_CUDA is set: there, a torch without CUDA is a mistake."""
    if is_rehearsal():
        return rehearsed_copier(**options)
    if not torch.cuda.is_available():
        give_up = pytest.fail if os.environ.get("REQUIRE_CUDA") else pytest.skip
        give_up("runs on a machine with a CUDA GPU")
    from lmcache_connector.copy_kv_blocks.cuda import CudaCopier  # loads Triton

    return CudaCopier(torch.device("cuda", 0), **options)


def rehearsed_copier(**options: int) -> Any:
    """A ``CudaCopier`` with these options. From here on this process makes no others."""
    from lmcache_connector.copy_kv_blocks import cuda
    from lmcache_connector.copy_kv_blocks.cuda_gather import RowCopyKernel

    lock = threading.Lock()

    class OneAtATime(RowCopyKernel):
        """Triton's interpreter is for one thread."""

        def launch(self, *args: Any) -> None:
            with lock:
                super().launch(*args)

    vars(cuda).update(torch=_HostTorch(), CudaDriver=HostDriver, RowCopyKernel=OneAtATime)
    return cuda.CudaCopier(HOST, **options)
