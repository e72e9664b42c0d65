"""A real GPU for storms: its compute stream, its memory, real time. Copies are `CudaCopier`'s.

A forward pass is a kernel that keeps a multiprocessor busy for so long. In its middle the stream
compares every byte of KV before the pass' tokens with its pattern, and at its end it writes the
pass' own KV. So a store that does not wait for its pass copies old bytes, and a load at the wrong
time or place is found by the pass that needs it.

``HostDevice`` does the same at once, without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_storms.passes import GpuShape, Work
from tests.support.doubles.rehearsed_cuda import HostEvent, RehearsedDevice

_WORD_BYTES = 8
_TRIAL_CYCLES = 100_000_000  # some 50 ms
_BLOCKS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class CudaPass:
    """``ended``: an event behind it. ``ends_at``: its predicted end, on the host's clock; the
    device tells none."""

    ended: Any
    ends_at: float

    def wait(self) -> None:
        self.ended.synchronize()


class HostPass(CudaPass):
    """Its work is done at launch; ``wait`` lasts as long as the pass would."""

    def wait(self) -> None:
        time.sleep(max(0.0, self.ends_at - time.monotonic()))


class CudaDevice:
    """``kv_caches`` of ``shape`` on one device. One thread launches passes, on its current
    stream."""

    def __init__(self, shape: GpuShape, device: torch.device) -> None:
        num_blocks, *block = shape.cache_size
        words = 2 * int(torch.Size(block).numel()) // _WORD_BYTES
        self._layers = [
            torch.zeros((num_blocks, words), dtype=torch.int64, device=device)
            for _ in shape.layer_names
        ]
        self._places = torch.arange(words, dtype=torch.int64, device=device)
        self._num_wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._device = device
        self._free_at = 0.0
        self._cycles_per_second = self._measure()
        self.kv_caches = {
            name: layer.view(torch.bfloat16).view(shape.cache_size)
            for name, layer in zip(shape.layer_names, self._layers, strict=True)
        }

    def launch(self, seconds: float, blocks: Collection[int], works: Sequence[Work]) -> CudaPass:
        self._free_at = max(self._free_at, time.monotonic()) + seconds
        self._spin(seconds / 2)
        for work in works:
            self._check(work)
        self._spin(seconds / 2)
        for work in works:
            self._write(work)
        return self._ending()

    def busy_seconds(self) -> float:
        """The host's estimate."""
        return max(0.0, self._free_at - time.monotonic())

    def reset(self) -> None:
        """Clear the memory."""
        for layer in self._layers:
            layer.zero_()

    def check(self) -> None:
        """Raises ``RuntimeError`` if a pass has found wrong KV."""
        if num_wrong := int(self._num_wrong.item()):
            raise RuntimeError(f"WRONG BYTES: passes have computed on {num_wrong} wrong words")

    # -- on the compute stream ---------------------------------------------------------------------

    def _check(self, work: Work) -> None:
        for layer, held, digests in self._pieces(*work.before()):
            self._num_wrong += (self._layers[layer][held] != self._pattern(layer, digests)).sum()

    def _write(self, work: Work) -> None:
        for layer, blocks, digests in self._pieces(*work.written()):
            self._layers[layer].index_copy_(0, blocks, self._pattern(layer, digests))

    def _pieces(
        self, blocks: Sequence[int], digests: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Layer, blocks and their digests, for a bounded number of blocks at a time."""
        if not blocks:
            return
        where, what = self._upload(blocks), self._upload(digests)
        for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
            piece = slice(first, first + _BLOCKS_AT_ONCE)
            for layer in range(len(self._layers)):
                yield layer, where[piece], what[piece]

    def _pattern(self, layer: int, digests: torch.Tensor) -> torch.Tensor:
        """int64 ``[blocks, words]``: all words of a block differ, and all layers."""
        return digests[:, None] * (2 * layer + 1) + self._places

    def _upload(self, numbers: Sequence[int]) -> torch.Tensor:
        """Does not wait for the copy, as that would wait for all earlier passes."""
        pinned = torch.tensor(numbers, dtype=torch.int64).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _spin(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_second))

    def _ending(self) -> CudaPass:
        ended = torch.cuda.Event(blocking=True)
        ended.record()
        return CudaPass(ended, self._free_at)

    def _measure(self) -> float:
        """Cycles per second of the clock that `_sleep` counts, once the GPU has woken up."""
        torch.cuda._sleep(_TRIAL_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(_TRIAL_CYCLES)
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return 1000 * _TRIAL_CYCLES / milliseconds


class HostDevice(CudaDevice):
    """Replaces a GPU."""

    def __init__(self, shape: GpuShape) -> None:
        super().__init__(shape, torch.device("cpu"))

    def _upload(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    def _spin(self, seconds: float) -> None:
        """Does nothing: see :class:`HostPass`."""

    def _ending(self) -> CudaPass:
        return HostPass(HostEvent(RehearsedDevice()), self._free_at)

    def _measure(self) -> float:
        return 0.0
