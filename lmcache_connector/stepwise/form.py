"""The form of a model's KV, and tensors viewed as blocks of it.

K and V of a layer are separate tensors here, so each counts as one layer of the copies, with the
content of one token and head as its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.kv_layout.paged_cache import LayerSpec, PagedLayout
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.worker.paged_part import PagedPart

_HALVES = ("keys", "values")


@dataclass(frozen=True, slots=True)
class KVForm:
    """``widths``: elements of one token and head, for K and V of each layer in turn. ``dtype``: as
    in torch, without ``torch.``."""

    num_heads: int
    widths: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> KVForm:
        """``tensors``: K and V of each layer in turn, ``[..., heads, tokens, content]``. Raises
        :class:`UnsupportedError` if they differ in heads, dtype or device."""
        if not tensors:
            raise UnsupportedError("This model keeps no KV: there is nothing to store.")
        heads, dtypes = {each.shape[-3] for each in tensors}, {each.dtype for each in tensors}
        devices = {each.device for each in tensors}
        for what, found, remedy in (
            ("Layers of several numbers of KV heads", heads, "use the model without this cache"),
            ("Layers of several dtypes", dtypes, "use the model without this cache"),
            ("Layers on several devices", devices, "put the model on one"),
        ):
            if len(found) > 1:
                names = ", ".join(sorted(map(str, found)))
                raise UnsupportedError(f"{what} ({names}) are not supported: {remedy}.")
        return cls(
            num_heads=heads.pop(),
            widths=tuple(each.shape[-1] for each in tensors),
            dtype=str(dtypes.pop()).removeprefix("torch."),
        )

    def is_of(self, tensors: Sequence[torch.Tensor], num_tokens: int, device: torch.device) -> bool:
        """Whether ``tensors``, as in :meth:`of`, have this form and are on ``device``."""
        found = [(*each.shape[-3:], each.dtype, each.device) for each in tensors]
        rest = (self.torch_dtype, device)
        return found == [(self.num_heads, num_tokens, width, *rest) for width in self.widths]

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def geometry(self, chunk_size: int) -> ChunkGeometry:
        size = self.torch_dtype.itemsize
        return ChunkGeometry(
            num_tokens=chunk_size,
            layer_start=0,
            layer_widths=tuple(width * size for width in self.widths),
            shards=tuple(range(self.num_heads)),
            num_shards_total=self.num_heads,
            dtype=self.dtype,
        )

    def part(self, blocks: Sequence[torch.Tensor], chunk_size: int) -> PagedPart:
        """``blocks``: K and V of each layer in turn, ``[blocks, heads, tokens, content]``, of any
        strides. Raises ``LayoutError`` for a layout that cannot be verified."""
        geometry = self.geometry(chunk_size)
        caches = {f"layer {i // 2} {_HALVES[i % 2]}": each for i, each in enumerate(blocks)}
        specs = {
            name: LayerSpec(self.num_heads, blocks[0].shape[2], width)
            for name, width in zip(caches, geometry.layer_widths, strict=True)
        }
        paged = PagedLayout.from_kv_caches(caches, specs)
        return PagedPart(geometry, (paged,), (tuple(range(len(blocks))),))

    def empty(self, num_tokens: int, device: torch.device) -> list[torch.Tensor]:
        """K and V of each layer in turn, ``[1, heads, num_tokens, content]``, uninitialised."""
        dtype = self.torch_dtype
        return [
            torch.empty((1, self.num_heads, num_tokens, width), dtype=dtype, device=device)
            for width in self.widths
        ]


def as_blocks(tensor: torch.Tensor, block_size: int) -> torch.Tensor:
    """View one sequence's whole blocks: ``[1, heads, tokens, content]`` as ``[blocks, heads,
    block_size, content]``."""
    num_blocks = tensor.shape[2] // block_size
    return (
        tensor[0, :, : num_blocks * block_size]
        .unflatten(1, (num_blocks, block_size))
        .transpose(0, 1)
    )
