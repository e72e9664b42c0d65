"""The copy engine: copies KV blocks between a paged cache and chunks, or another paged cache.

``Copier`` is the interface, with one implementation per kind of device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from lmcache_connector.copy_kv_blocks.plan import BlockCopy
from lmcache_connector.kv_layout.paged_cache import LayoutError

Direction = Literal["h2d", "d2h"]


class Fence(Protocol):
    """A point in a device's work that a copy can wait for: a CUDA event."""

    def query(self) -> bool:
        """Whether the device has reached this point."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds of device time from this fence to a later one. Both must be reached."""


@dataclass(frozen=True, slots=True)
class QueuedCopy:
    """A copy of ``num_bytes`` that the device makes between two fences; done if there are none.
    ``kept``: keeps the device's memory alive until the copy is done."""

    num_bytes: int
    before: Fence | None = None
    after: Fence | None = None
    kept: object = None

    @property
    def is_done(self) -> bool:
        return self.after is None or self.after.query()

    @property
    def seconds(self) -> float:
        """Device time of the copy, once done; 0 without fences."""
        return self.before.elapsed_time(self.after) / 1000 if self.before is not None else 0.0


class Copier(Protocol):
    """Copies blocks for one device. Construction or the first copy compiles kernels, in seconds.

    ``shares_cores``: copies run on the cores that compute the model.
    """

    shares_cores: bool

    def fence(self) -> Fence | None:
        """Mark the end of the work submitted to the device so far. Cheap; never waits."""

    def copy(
        self, copies: Sequence[BlockCopy], direction: Direction, after: Fence | None = None
    ) -> int:
        """Make ``copies``, for example one per KV cache group; returns the bytes copied.

        Copies start when ``after`` is reached, and block the calling thread, but not the GIL, until
        the bytes have arrived. Raises what :meth:`BlockCopy.plan` raises, before any copy.
        """

    def enqueue(self, copies: Sequence[BlockCopy]) -> QueuedCopy:
        """Copy to the device, after all work submitted so far and before all later work. Does not
        wait: the chunks must stay unchanged until the copy is done."""

    def close(self) -> None:
        """Release all resources. No copy may be running or follow."""


def make_copier(device: torch.device) -> Copier:
    """The copier for KV caches on ``device``. Raises :class:`LayoutError` for other devices."""
    if device.type == "cpu":
        from lmcache_connector.copy_kv_blocks.cpu import CpuCopier

        return CpuCopier()
    if device.type == "cuda" and torch.version.hip is None:
        from lmcache_connector.copy_kv_blocks.cuda import CudaCopier

        return CudaCopier(device)
    raise LayoutError(f"KV caches on {device.type!r} devices are not supported")
