"""KV caches in every layout, and the same copies done the slow, obvious way with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import LayerSpec, PagedLayout, Plane
from lmcache_connector.storage.geometry import ChunkGeometry

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@dataclass(frozen=True)
class Paged:
    """``memory``: all bytes of the cache, with whatever lies between them. ``caches``: as vLLM
    registers them."""

    memory: torch.Tensor
    caches: dict[str, torch.Tensor]
    specs: dict[str, LayerSpec]

    @property
    def layout(self) -> PagedLayout:
        return PagedLayout.from_kv_caches(self.caches, self.specs)

    def blocks(self) -> list[torch.Tensor]:
        """Per layer [blocks, heads, tokens of a block, content bytes] on the host: a copy.

        With planes [blocks, heads, bytes], as they lie.
        """
        found = []
        for name, spec in self.specs.items():
            cache = self.caches[name].contiguous().view(torch.uint8).cpu()
            parts = spec.block_size // cache.shape[2]
            cache = cache.unflatten(0, (-1, parts)).permute(0, 2, 1, 3, 4).flatten(2, 3)
            found.append(cache.flatten(2) if spec.planes else cache.clone())
        return found


@dataclass(frozen=True)
class Chunks:
    """``pool``: uint8 [chunks, chunk bytes]. ``planes``: of the cache they belong to."""

    pool: torch.Tensor
    geometry: ChunkGeometry
    block_size: int
    planes: tuple[Plane, ...] = ()

    @property
    def buffers(self) -> ChunkBuffers:
        addresses = [chunk.data_ptr() for chunk in self.pool]
        return ChunkBuffers(
            self.geometry, self.block_size, addresses, self.pool, planes=self.planes
        )

    def blocks(self) -> list[torch.Tensor]:
        """As ``Paged.blocks``."""
        geometry, found = self.geometry, []
        heads = self.pool.clone().view(len(self.pool), len(geometry.shards), geometry.shard_bytes)
        for layer, width in enumerate(geometry.layer_widths):
            start, end = geometry.layer_offsets[layer : layer + 2]
            part = heads[:, :, start:end]
            if self.planes:
                found.append(self._in_planes(part))
                continue
            tokens = part.unflatten(2, (-1, self.block_size, width))
            found.append(tokens.permute(0, 2, 1, 3, 4).flatten(0, 1))
        return found

    def _in_planes(self, layer: torch.Tensor) -> torch.Tensor:
        """[chunks, heads, bytes] cut into blocks: [blocks, heads, bytes]."""
        sizes = [plane.token_bytes * self.geometry.num_tokens for plane in self.planes]
        parts = []
        for plane, part in zip(self.planes, layer.split(sizes, dim=2), strict=True):
            run = self.block_size * plane.run_token_bytes
            runs = part.unflatten(2, (plane.num_runs, -1, run))
            parts.append(runs.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(2))
        return torch.cat(parts, dim=2)


def random_bytes(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)


def paged(
    layout: str,
    *,
    layers: int = 3,
    blocks: int = 7,
    heads: int = 2,
    tokens: int = 16,
    content: int = 24,
    dtype: torch.dtype = torch.uint8,
    kernel_tokens: int | None = None,
    padding: int = 0,
    device: str = "cpu",
    seed: int = 0,
    planes: tuple[Plane, ...] = (),
) -> Paged:
    """A cache of random bytes in one tensor in physical order, ``content`` in bytes.

    ``padding`` bytes follow the content of every token.
    """
    kernel_tokens = kernel_tokens or tokens
    sizes = {"L": layers, "B": blocks * tokens // kernel_tokens, "H": heads, "N": kernel_tokens}
    memory = random_bytes(
        *(sizes[axis] for axis in layout[:4]), content + padding, device=device, seed=seed
    )
    logical = memory.permute([layout.index(axis) for axis in "LBHNC"])[..., :content]
    caches = {f"layers.{i}": logical[i].view(dtype) for i in range(layers)}
    return Paged(memory, caches, dict.fromkeys(caches, LayerSpec(heads, tokens, content, planes)))


def chunks(like: Paged, num_chunks: int, blocks_per_chunk: int = 2, seed: int = 1) -> Chunks:
    """Chunks of random bytes that fit a cache; pinned if that is on a GPU."""
    specs = list(like.specs.values())
    heads = specs[0].num_kv_heads
    geometry = ChunkGeometry(
        num_tokens=specs[0].block_size * blocks_per_chunk,
        layer_start=0,
        layer_widths=tuple(spec.content_bytes for spec in specs),
        shards=tuple(range(heads)),
        num_shards_total=heads,
        dtype="uint8",
    )
    pool = random_bytes(num_chunks, geometry.chunk_bytes, seed=seed)
    on_gpu = like.memory.device.type == "cuda"
    pool = pool.pin_memory() if on_gpu else pool
    return Chunks(pool, geometry, specs[0].block_size, specs[0].planes)


def expected_blocks(
    src: Paged | Chunks, dst: Paged | Chunks, src_ids: Sequence[int], dst_ids: Sequence[int]
) -> list[torch.Tensor]:
    """The destination's blocks after the copy, by a plain assignment."""
    expected = dst.blocks()
    for layer, source in zip(expected, src.blocks(), strict=True):
        layer[list(dst_ids)] = source[list(src_ids)]
    return expected


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )
