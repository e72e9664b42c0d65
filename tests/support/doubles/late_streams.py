"""CUDA's streams at their worst: nothing runs before somebody waits for it, and what no event
orders runs in random order.

Host memory plays the device's, as in :mod:`rehearsed_cuda`. A copy that lacks a wait takes or
leaves other bytes here for some seed, where a GPU is mostly quick enough to hide it.
"""

from __future__ import annotations

import contextlib
import ctypes
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


class LateStream:
    """``given`` is done in order, and the first ``num_done`` of it have been."""

    def __init__(self, device: LateDevice, number: int) -> None:
        self.cuda_stream = number
        self.given: list[Work | LateEvent] = []
        self.num_done = 0
        self._device = device

    def wait_event(self, event: LateEvent) -> None:
        self.given.append(event.copy())

    def wait_stream(self, stream: LateStream) -> None:
        event = LateEvent(self._device)
        event.record(stream)
        self.given.append(event)

    @property
    def may_go_on(self) -> bool:
        if self.num_done == len(self.given):
            return False
        work = self.given[self.num_done]
        return not isinstance(work, LateEvent) or work.query()

    def go_on(self) -> None:
        work = self.given[self.num_done]
        if not isinstance(work, LateEvent):
            work()
        self.num_done += 1


class LateEvent:
    def __init__(self, device: LateDevice, **_: bool) -> None:
        self._device = device
        self._stream: LateStream | None = None
        self._place = 0

    def record(self, stream: LateStream) -> None:
        self._stream, self._place = stream, len(stream.given)

    def copy(self) -> LateEvent:
        """As recorded by now: to record it again changes nothing for who waits already."""
        event = LateEvent(self._device)
        event._stream, event._place = self._stream, self._place
        return event

    def query(self) -> bool:
        self._device.asked_on.append(self._device.of_thread)
        return self._stream is None or self._stream.num_done >= self._place

    def synchronize(self) -> None:
        self._device.run_until(self.query)


class LateMemory(torch.Tensor):
    """Of the device: what is copied to it arrives in the order of the current stream."""

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> LateMemory:
        plain = self.as_subclass(torch.Tensor)
        device = _devices[self.untyped_storage().data_ptr()]
        device.give(partial(plain.copy_, source))
        return self


_devices: dict[int, LateDevice] = {}


class LateDevice:
    """``compute`` is the stream of the forward passes. ``asked_on``: the device that the thread was
    on, for each question about an event."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._lock = threading.RLock()
        self._thread = threading.local()
        self.streams: list[LateStream] = []
        self.compute = self._stream()
        self.asked_on: list[object] = []

    @property
    def of_thread(self) -> object:
        return getattr(self._thread, "device", None)

    def give(self, work: Work) -> None:
        """To the current stream."""
        self._current().given.append(work)

    def run_until(self, is_over: Callable[[], bool]) -> None:
        with self._lock:
            while not is_over():
                ready = [stream for stream in self.streams if stream.may_go_on]
                assert ready, "streams wait for each other"
                self._chance.choice(ready).go_on()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Copiers made from here on are of this device, as long as ``patch`` lasts."""
        from lmcache_connector.copy_kv_blocks import cuda
        from lmcache_connector.copy_kv_blocks.cuda_gather import RowCopyKernel

        device = self

        class Kernel(RowCopyKernel):
            def launch(self, *args: Any) -> None:
                device.give(partial(super().launch, *args))

        patch.setattr(cuda, "torch", _LateTorch(self))
        patch.setattr(cuda, "CudaDriver", partial(_LateDriver, self))
        patch.setattr(cuda, "RowCopyKernel", Kernel)

    def shuffled(self, count: int) -> list[int]:
        return self._chance.sample(range(count), count)

    def _stream(self, _: object = None) -> LateStream:
        self.streams.append(LateStream(self, len(self.streams)))
        return self.streams[-1]

    def _current(self, _: object = None) -> LateStream:
        return getattr(self._thread, "stream", self.compute)

    @contextlib.contextmanager
    def _with(self, **values: object) -> Iterator[None]:
        before = dict(vars(self._thread))
        vars(self._thread).update(values)
        yield
        vars(self._thread).clear()
        vars(self._thread).update(before)


class _LateTorch:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.cuda = SimpleNamespace(
            Stream=device._stream,
            Event=partial(LateEvent, device),
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
        if "device" not in options:
            return memory
        _devices[memory.untyped_storage().data_ptr()] = self._device
        self._device.compute.given.append(memory.zero_)
        return memory.as_subclass(LateMemory)


class _LateDriver:
    """Stands for ``CudaDriver``. What is copied by one call is in no order."""

    def __init__(self, device: LateDevice, index: int) -> None:
        self._device = device

    def bind(self) -> None: ...

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        self._device.streams[stream].given.append(partial(ctypes.memmove, dst, src, num_bytes))

    def copy_many(self, dst: Int64s, src: Int64s, num_bytes: Int64s, stream: int) -> None:
        for i in self._device.shuffled(len(dst)):
            self.copy(int(dst[i]), int(src[i]), int(num_bytes[i]), stream)

    def close(self) -> None: ...
