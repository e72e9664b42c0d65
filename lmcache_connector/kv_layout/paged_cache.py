"""The address of every KV byte in a paged KV cache.

Both sides of a copy, this one and :class:`~lmcache_connector.kv_layout.chunk_buffers.ChunkBuffers`,
give the address of a token's content::

    address(layer, row, head, token) = anchor[row] + offset[layer] + index[row] * row_stride[layer]
                                     + head * head_stride[layer] + token * token_stride[layer]

A *row* is a run of ``row_tokens`` tokens over all layers: one block, or one kernel block where an
attention backend splits vLLM's blocks. In a paged cache ``anchor`` is 0 and ``index`` the row's
number; in a list of chunks ``anchor`` is the chunk's address and ``index`` the row in the chunk.

Strides come from the tensors and sizes from the KV cache spec. :class:`LayoutError` is raised
unless they are proved to agree. That no two layers of a block share memory is left to the
self-test, which writes different bytes to each.

Some backends do not lay out one head's share of a block token by token (see :class:`Plane`). A
table then has one entry per layer and plane, and "token" above means a run of a plane. A chunk has
the layout of one block as large as the chunk, so that chunks do not depend on the block size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Int64s = npt.NDArray[np.int64]
T = TypeVar("T")


class LayoutError(ValueError):
    """A layout that is not supported, or that cannot be verified against the KV cache spec."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Some of a head's memory in a block: ``[num_runs][tokens][run_token_bytes]``. For example,
    16-bit K with tokens innermost has a run per element of the head, with 2 bytes for each token.
    """

    num_runs: int
    run_token_bytes: int

    @property
    def token_bytes(self) -> int:
        return self.num_runs * self.run_token_bytes


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer according to vLLM's KV cache spec.

    ``content_bytes`` is the K and V of one token of one KV head; ``block_size`` is in tokens.
    ``planes`` follow one another in a head's share of a block; without planes, tokens do.
    """

    num_kv_heads: int
    block_size: int
    content_bytes: int
    planes: tuple[Plane, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """Counts, and sizes and strides in bytes. Arrays are int64 ``[layers * planes of a layer]``.

    ``num_runs``: runs of content in one row of one head; without planes each run is a token.
    """

    row_tokens: int
    num_heads: Int64s
    num_runs: Int64s
    content_bytes: Int64s
    offset: Int64s
    row_stride: Int64s
    head_stride: Int64s
    token_stride: Int64s

    @classmethod
    def of(cls, row_tokens: int, entries: Iterable[tuple[int, ...]]) -> LayerTable:
        """``entries``: the other fields, in order, of each layer and plane."""
        return cls(row_tokens, *np.array(list(entries), np.int64).T.copy())


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a copy, int64 ``[rows]`` each; see the module's docstring."""

    anchor: Int64s
    index: Int64s


@dataclass(frozen=True, eq=False)
class PagedLayout:
    """A paged KV cache: every layer as logical (blocks, KV heads, tokens, content) with strides.

    ``row_tokens`` divides ``block_size``: an attention backend may split vLLM's blocks. ``spans``:
    the memory used, int64 ``[n, 2]``, ascending, first byte and one past the last. ``owners`` are
    the layers' tensors, ``[rows, heads, row_tokens, content]``.
    """

    names: tuple[str, ...]
    device: torch.device
    block_size: int
    row_tokens: int
    num_blocks: int
    layers: LayerTable
    spans: Int64s
    owners: tuple[torch.Tensor, ...]
    planes: tuple[Plane, ...] = ()

    addresses: ClassVar[Int64s] = np.zeros(1, np.int64)
    """The anchor of all rows, 0: offsets of layers are addresses."""

    @classmethod
    def from_kv_caches(
        cls, kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, LayerSpec]
    ) -> PagedLayout:
        """View the tensors that vLLM registered, one per layer, in the order of ``specs``. The
        layers must share block ids. Raises :class:`LayoutError` for what cannot be verified.
        """
        if not specs or kv_caches.keys() != specs.keys():
            odd = sorted(kv_caches.keys() ^ specs.keys())
            raise LayoutError(f"layers of KV cache and spec differ: {odd or 'there are none'}")
        for name, spec in specs.items():
            _check_layer(name, kv_caches[name], spec)
        tensors = [kv_caches[name] for name in specs]
        device = _the_one("device", [tensor.device for tensor in tensors])
        block_size = _the_one("block size", [spec.block_size for spec in specs.values()])
        planes = _the_one("planes", [spec.planes for spec in specs.values()])
        row_tokens = _the_one("kernel block size", [tensor.shape[2] for tensor in tensors])
        num_rows = _the_one("number of blocks", [tensor.shape[0] for tensor in tensors])
        split = block_size // row_tokens
        if num_rows % split:
            raise LayoutError(f"{num_rows} kernel blocks are no multiple of {split} per block")
        return cls(
            names=tuple(specs),
            device=device,
            block_size=block_size,
            row_tokens=row_tokens,
            num_blocks=num_rows // split,
            layers=LayerTable.of(
                row_tokens, (fact for tensor in tensors for fact in _facts(tensor, planes))
            ),
            spans=np.array(_spans(tensors), np.int64),
            owners=tuple(tensors),
            planes=planes,
        )


def _check_layer(name: str, tensor: object, spec: LayerSpec) -> None:
    """Raise unless a layer's tensor has the shape of its spec and contiguous content."""
    if min(spec.num_kv_heads, spec.block_size, spec.content_bytes) <= 0:
        raise LayoutError(f"{name}: {spec} has a size that is not positive")
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4 or tensor.is_sparse:
        raise LayoutError(f"{name}: expected a (blocks, heads, tokens, content) tensor")
    _, heads, tokens, content = tensor.shape
    if heads != spec.num_kv_heads:
        raise LayoutError(f"{name}: {heads} KV heads, the spec has {spec.num_kv_heads}")
    if tokens == 0 or spec.block_size % tokens:
        raise LayoutError(f"{name}: blocks of {tokens} tokens, the spec has {spec.block_size}")
    if content * tensor.element_size() != spec.content_bytes:
        raise LayoutError(
            f"{name}: a token's content has {content * tensor.element_size()} bytes, "
            f"the spec has {spec.content_bytes}"
        )
    if content > 1 and tensor.stride(3) != 1:
        raise LayoutError(f"{name}: a token's content is not contiguous {tuple(tensor.stride())}")
    check_planes(name, spec.planes, spec.content_bytes)
    if spec.planes and tokens > 1 and tensor.stride(2) != content:
        raise LayoutError(f"{name}: a block is not contiguous {tuple(tensor.stride())}")


def check_planes(name: str, planes: tuple[Plane, ...], content_bytes: int) -> None:
    """The planes must cover a token's content exactly. Raises :class:`LayoutError`."""
    if planes and sum(plane.token_bytes for plane in planes) != content_bytes:
        raise LayoutError(f"{name}: {planes} are not the {content_bytes} bytes of a token")


def _facts(tensor: torch.Tensor, planes: tuple[Plane, ...]) -> Iterator[tuple[int, ...]]:
    """One layer's entries for `LayerTable.of`."""
    size, (_, heads, tokens, content) = tensor.element_size(), tensor.shape
    row_stride, head_stride, token_stride = (tensor.stride(axis) * size for axis in range(3))
    address = tensor.data_ptr()
    if not planes:
        yield heads, tokens, content * size, address, row_stride, head_stride, token_stride
        return
    for plane in planes:
        run = plane.run_token_bytes * tokens
        yield heads, plane.num_runs, run, address, row_stride, head_stride, run
        address += plane.num_runs * run


def _the_one(what: str, values: Sequence[T]) -> T:
    """The value that all layers share. Raises :class:`LayoutError` if they differ."""
    if len(set(values)) != 1:
        raise LayoutError(f"layers differ in their {what}: {sorted(map(str, set(values)))}")
    return values[0]


def _spans(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The memory of these layers, which may be interleaved: disjoint, ascending."""
    found = list[list[int]]()
    for first, end in sorted(map(_span, tensors)):
        if found and first < found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([first, end])
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and one past the last."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in axes)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
