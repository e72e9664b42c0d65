"""CUDA's copier on a machine without a GPU: what it will do there is run here, line by line.

Host memory plays the device's, the driver's copies are memmoves, and Triton's interpreter runs the
kernel: TRITON_INTERPRET=1 must be set before Triton is loaded. Streams execute work immediately.
Those of a *late* device are the worst case: work runs only when somebody waits for it, and in
random order unless events order it. With some seed, a copy that lacks a wait then moves wrong
bytes; a GPU is mostly quick enough to hide that. Nothing here says how fast anything is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_connector.kv_layout.paged_cache import Int64s

HOST = torch.device("cpu")
Work = Callable[[], object]


def is_rehearsal() -> bool:
    """Whether this process was told to do without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class HostStream:
    """``given`` is done in order, and the first ``num_done`` of it have been."""

    def __init__(self, device: RehearsedDevice, number: int) -> None:
        self.cuda_stream = number
        self.given: list[Work | HostEvent] = []
        self.num_done = 0
        self._device = device

    def give(self, work: Work) -> None:
        if self._device.is_late:
            self.given.append(work)
        else:
            with self._device.lock:  # Triton's interpreter is for one thread
                work()

    def wait_event(self, event: HostEvent) -> None:
        self.given += [event.copy()] if self._device.is_late else []

    def wait_stream(self, stream: HostStream) -> None:
        event = HostEvent(self._device)
        event.record(stream)
        self.wait_event(event)

    @property
    def may_go_on(self) -> bool:
        if self.num_done == len(self.given):
            return False
        work = self.given[self.num_done]
        return not isinstance(work, HostEvent) or work.query()

    def go_on(self) -> None:
        work = self.given[self.num_done]
        if not isinstance(work, HostEvent):
            work()
        self.num_done += 1


class HostEvent:
    def __init__(self, device: RehearsedDevice, **_: bool) -> None:
        self._device = device
        self._stream: HostStream | None = None
        self._place = 0

    def record(self, stream: HostStream) -> None:
        self._stream, self._place = stream, len(stream.given)

    def elapsed_time(self, end: object) -> float:
        return 0.0

    def copy(self) -> HostEvent:
        """As it is recorded now: recording it again does not change what a stream waits for."""
        event = HostEvent(self._device)
        event._stream, event._place = self._stream, self._place
        return event

    def query(self) -> bool:
        if self._device.is_late:
            self._device.asked_on.append(self._device.of_thread)
        return self._stream is None or self._stream.num_done >= self._place

    def synchronize(self) -> None:
        self._device.run_until(self.query)


class HostMemory(torch.Tensor):
    """Of the device: what is copied to it arrives in the order of the current stream."""

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> HostMemory:
        plain = self.as_subclass(torch.Tensor)
        device = _devices[self.untyped_storage().data_ptr()]
        device.give(partial(plain.copy_, source))
        return self


_devices: dict[int, RehearsedDevice] = {}


class RehearsedDevice:
    """``compute`` is the stream of the forward passes. ``asked_on``: the device that the thread was
    on, for each question about an event of a late device."""

    def __init__(self, seed: int = 0, *, is_late: bool = False) -> None:
        self.is_late = is_late
        self.lock = threading.RLock()
        self._chance = random.Random(seed)
        self._thread = threading.local()
        self.streams: list[HostStream] = []
        self.compute = self._stream()
        self.asked_on: list[object] = []

    @property
    def of_thread(self) -> object:
        return getattr(self._thread, "device", None)

    def give(self, work: Work) -> None:
        """To the current stream."""
        self._current().give(work)

    def run_until(self, is_over: Callable[[], bool]) -> None:
        with self.lock:
            while not is_over():
                ready = [stream for stream in self.streams if stream.may_go_on]
                assert ready, "streams wait for each other"
                self._chance.choice(ready).go_on()

    def install(self, put: Callable[[Any, str, object], None]) -> None:
        """Copiers made from here on are of this device. ``put``: ``setattr``, or a patch's."""
        from lmcache_connector.copy_kv_blocks import cuda
        from lmcache_connector.copy_kv_blocks.cuda_gather import RowCopyKernel

        device = self

        class Kernel(RowCopyKernel):
            def launch(self, *args: Any) -> None:
                device.give(partial(super().launch, *args))

        put(cuda, "torch", _HostTorch(self))
        put(cuda, "CudaDriver", partial(_HostDriver, self))
        put(cuda, "RowCopyKernel", Kernel)

    def shuffled(self, count: int) -> list[int]:
        return self._chance.sample(range(count), count)

    def _stream(self, _: object = None) -> HostStream:
        self.streams.append(HostStream(self, len(self.streams)))
        return self.streams[-1]

    def _current(self, _: object = None) -> HostStream:
        return getattr(self._thread, "stream", self.compute)

    @contextlib.contextmanager
    def _with(self, **values: object) -> Iterator[None]:
        before = dict(vars(self._thread))
        vars(self._thread).update(values)
        yield
        vars(self._thread).clear()
        vars(self._thread).update(before)


class _HostTorch:
    def __init__(self, device: RehearsedDevice) -> None:
        self._device = device
        self.cuda = SimpleNamespace(
            Stream=device._stream,
            Event=partial(HostEvent, device),
            current_device=lambda: 0,
            current_stream=device._current,
            device=lambda which: device._with(device=which),
            stream=lambda stream: device._with(stream=stream),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: object) -> torch.device:
        return HOST

    def empty(self, *size: int, dtype: torch.dtype, **options: object) -> torch.Tensor:
        """Memory of the device comes from the compute stream: its last owner may still write."""
        memory = torch.zeros(*size, dtype=dtype)
        if "device" not in options or not self._device.is_late:
            return memory
        _devices[memory.untyped_storage().data_ptr()] = self._device
        self._device.compute.given.append(memory.zero_)
        return memory.as_subclass(HostMemory)


class _HostDriver:
    """Stands for ``CudaDriver``. What is copied by one call is in no order."""

    def __init__(self, device: RehearsedDevice, index: int) -> None:
        self._device = device

    def bind(self) -> None: ...

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        self._device.streams[stream].give(partial(ctypes.memmove, dst, src, num_bytes))

    def copy_many(self, dst: Int64s, src: Int64s, num_bytes: Int64s, stream: int) -> None:
        for i in self._device.shuffled(len(dst)):
            self.copy(int(dst[i]), int(src[i]), int(num_bytes[i]), stream)

    def close(self) -> None: ...


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

    RehearsedDevice().install(setattr)
    return cuda.CudaCopier(HOST, **options)
