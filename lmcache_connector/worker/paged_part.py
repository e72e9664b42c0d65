"""One part of a model's KV in a rank's paged cache: see :mod:`lmcache_connector.kv_parts.part`.

vLLM's KV cache groups share memory: a block id belongs to one group at a time, and views of
different groups cover the same bytes. The self-test shows that the layers of a group are disjoint;
:meth:`PagedPart.copies` checks that a run lists no block for two groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmcache_connector.copy_kv_blocks.plan import BlockCopy, CopyError
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import LayerSpec, PagedLayout, Plane
from lmcache_connector.kv_layout.topology import PartLayout
from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.plans import PartRun
from lmcache_connector.storage.geometry import ChunkGeometry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class PagedPart:
    """``groups[i]`` is the cache of the part's layers in its i-th KV cache group, ``places[i]``
    their indices among the layers of ``geometry``. ``formats``: storage format of each layer.
    ``mixed_tokens``: tokens whose bytes may be interleaved.
    """

    geometry: ChunkGeometry
    groups: tuple[PagedLayout, ...]
    places: tuple[tuple[int, ...], ...]
    formats: tuple[str, ...] = ()
    mixed_tokens: int = 1

    @classmethod
    def from_kv_caches(
        cls, part: PartLayout, rank: int, kv_caches: Mapping[str, torch.Tensor]
    ) -> PagedPart:
        """View vLLM's registered tensors. Layers that share another's cache are in no part. Raises
        :class:`LayoutError` if the layout cannot be verified."""
        geometry = part.geometries[rank]
        # A state's block holds one snapshot, in the place of a token.
        block_size = 1 if part.part.rule is Rule.STATE else part.part.block_size
        groups = []
        for group in part.groups:
            specs = {
                name: LayerSpec(
                    part.num_kv_heads, block_size, geometry.layer_widths[place], part.planes
                )
                for name, place in zip(group.names, group.positions, strict=True)
            }
            caches = {name: kv_caches[name] for name in specs}
            groups.append(PagedLayout.from_kv_caches(caches, specs))
        places = tuple(group.positions for group in part.groups)
        return cls(geometry, tuple(groups), places, part.formats, part.mixed_tokens)

    @cached_property
    def blocks_per_chunk(self) -> int:
        """Blocks per chunk in each group."""
        return self.geometry.num_tokens // self.groups[0].block_size

    @property
    def is_planar(self) -> bool:
        """Whether a layer of a chunk holds all K before all V."""
        return bool(self.groups[0].planes)

    def copies(
        self, run: PartRun, addresses: Sequence[int], owners: object, *, to_chunks: bool
    ) -> list[BlockCopy]:
        """Copies between a run's blocks and its leading chunks at ``addresses``, in memory kept
        alive by ``owners``. Raises :class:`CopyError` for a block listed for two groups."""
        blocks = range(run.skip_blocks, len(addresses) * self.blocks_per_chunk)
        listed = [ids[: len(blocks)] for ids in run.block_ids]
        if len(listed) != len(self.groups):
            raise CopyError(f"blocks of {len(listed)} groups for a part in {len(self.groups)}")
        if len(listed) > 1 and len({i for ids in listed for i in ids}) < sum(map(len, listed)):
            raise CopyError("a block is listed for two KV cache groups")
        found = []
        for paged, places, ids in zip(self.groups, self.places, listed, strict=True):
            chunks = ChunkBuffers(
                self.geometry, paged.block_size, addresses, owners, places, paged.planes
            )
            of_chunks = blocks[: len(ids)]
            found.append(
                BlockCopy(paged, chunks, ids, of_chunks)
                if to_chunks
                else BlockCopy(chunks, paged, of_chunks, ids)
            )
        return found

    def clear_after(self, num_tokens: int, value: npt.NDArray[np.uint8]) -> None:
        """Zero a chunk's bytes after ``num_tokens``, rounded up to ``mixed_tokens``."""
        end, geometry = -(-num_tokens // self.mixed_tokens) * self.mixed_tokens, self.geometry
        for width, offset in zip(geometry.layer_widths, geometry.layer_offsets, strict=False):
            at = offset
            for plane in self.groups[0].planes or (Plane(1, width),):
                runs = value.reshape(len(geometry.shards), -1)[
                    :, at : at + plane.token_bytes * geometry.num_tokens
                ].reshape(len(geometry.shards), plane.num_runs, -1)
                runs[:, :, end * plane.run_token_bytes :] = 0
                at += plane.token_bytes * geometry.num_tokens


def only(run: PartRun, numbers: Sequence[int]) -> PartRun:
    """The chunks of ``run`` at these indices. A ``run`` of several chunks must not skip blocks."""
    if len(numbers) == len(run.keys):
        return run

    def blocks(ids: tuple[int, ...]) -> tuple[int, ...]:
        size = len(ids) // len(run.keys)
        return tuple(block for i in numbers for block in ids[i * size : (i + 1) * size])

    return replace(
        run,
        keys=tuple(run.keys[i] for i in numbers),
        chunks=tuple(run.chunks[i] for i in numbers),
        block_ids=tuple(map(blocks, run.block_ids)),
        parents=(),
    )


def in_pieces(run: PartRun, size: int, blocks_per_chunk: int) -> Iterator[PartRun]:
    """Split a run into pieces of ``size`` chunks."""
    for start in range(0, len(run.keys), size):
        yield piece(run, start, min(start + size, len(run.keys)), blocks_per_chunk)


def piece(run: PartRun, start: int, end: int, blocks_per_chunk: int) -> PartRun:
    """The chunks of ``run`` from index ``start`` up to, not including, ``end``."""
    first, last = (max(0, i * blocks_per_chunk - run.skip_blocks) for i in (start, end))
    return replace(
        run,
        keys=run.keys[start:end],
        chunks=run.chunks[start:end],
        block_ids=tuple(ids[first:last] for ids in run.block_ids),
        skip_blocks=run.skip_blocks if start == 0 else 0,
        parents=(),
    )
