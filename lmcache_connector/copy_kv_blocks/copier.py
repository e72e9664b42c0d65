"""The copy engine: copies KV blocks between a paged cache and chunks, or another paged cache.

``Copier`` is the interface, with one implementation per kind of device. ``copy_kv_blocks`` is a
plain function in the shape of vLLM's ``CopyBlocksOp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from lmcache_connector.copy_kv_blocks.plan import BlockCopy, CopyError
from lmcache_connector.kv_layout.chunk_buffers import BlockSpace
from lmcache_connector.kv_layout.paged_cache import LayerSpec, LayoutError, PagedLayout

Direction = Literal["h2d", "d2h"]
KVCaches = Mapping[str, torch.Tensor] | BlockSpace


class Fence(Protocol):
    """A point in a device's work that a copy can wait for: a CUDA event."""

    def query(self) -> bool:
        """Whether the device has reached this point."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds of device time from this fence to a later one. Both must be reached."""


@dataclass(frozen=True, slots=True)
class QueuedCopy:
    """A copy of ``num_bytes`` that the device makes between two fences; done if there are none.
    ``kept``: keeps the device's memory alive until then."""

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
    """Copies blocks for one device. Construction compiles kernels, which takes seconds.

    ``shares_cores``: copies run on the cores that compute the model.
    """

    shares_cores: bool

    def fence(self) -> Fence | None:
        """Mark the end of the work submitted to the device so far. Cheap; never waits."""

    def copy(
        self, copies: Sequence[BlockCopy], direction: Direction, after: Fence | None = None
    ) -> int:
        """Make copies between one set of chunks, or one cache, and others; returns bytes copied.

        They start when ``after`` is reached, and block the calling thread, but not the GIL, until
        the bytes have arrived. Raises :class:`CopyError` before any copy.
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


def copy_kv_blocks(
    src_kv_caches: KVCaches,
    dst_kv_caches: KVCaches,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: Direction,
    copier: Copier | None = None,
    after: Fence | None = None,
) -> int:
    """Copy blocks between two KV caches; returns the bytes copied, once they have arrived.

    A KV cache is a :class:`BlockSpace`, or a mapping from layer name to tensor, logical (blocks, KV
    heads, tokens, content) with any strides. ``h2d`` copies from host to device, ``d2h`` back.
    Without ``copier`` one is made for this call, which takes about a second.

    Raises :class:`CopyError` or :class:`LayoutError`, both ``ValueError``, before any copy.
    """
    if direction not in ("h2d", "d2h"):
        raise CopyError(f"direction must be 'h2d' or 'd2h', not {direction!r}")
    src, dst = _space(src_kv_caches), _space(dst_kv_caches)
    if isinstance(src, PagedLayout) and isinstance(dst, PagedLayout):
        _check_same_layers(src, dst)
    device = src.device if direction == "d2h" else dst.device
    own = copier or make_copier(device)
    try:
        return own.copy([BlockCopy(src, dst, src_block_ids, dst_block_ids)], direction, after)
    finally:
        if copier is None:
            own.close()


def _space(kv_caches: KVCaches) -> BlockSpace:
    if not isinstance(kv_caches, Mapping):
        return kv_caches
    specs = {}
    for name, tensor in kv_caches.items():
        if tensor.dim() != 4:
            raise LayoutError(f"{name}: expected a (blocks, heads, tokens, content) tensor")
        _, heads, tokens, content = tensor.shape
        specs[name] = LayerSpec(heads, tokens, content * tensor.element_size())
    return PagedLayout.from_kv_caches(kv_caches, specs)


def _check_same_layers(src: PagedLayout, dst: PagedLayout) -> None:
    if src.names != dst.names:
        odd = sorted(set(src.names) ^ set(dst.names))
        raise CopyError(f"source and destination differ in their layers: {odd or 'other order'}")
    if src.dtypes != dst.dtypes:
        raise CopyError(f"source dtypes {src.dtypes} differ from destination {dst.dtypes}")
