"""Blocks of any size, packed by vLLM's CPU kernel, become the same chunks, and chunks blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.platforms import current_platform

from lmcache_connector.copy_kv_blocks.cpu import CpuCopier
from lmcache_connector.copy_kv_blocks.plan import BlockCopy
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import LayerSpec, PagedLayout, Plane
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.vllm_compat.cpu_attention import CpuAttention, Packing, find_packing
from lmcache_connector.worker.paged_part import PagedPart
from tests.support.device import NEEDS_FP8_KV

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="runs on the CPU build")

HEADS, HEAD_SIZE, CHUNK, NUM_CHUNKS = 2, 64, 256, 3
NUM_TOKENS = CHUNK * NUM_CHUNKS
BF16 = CpuAttention(HEAD_SIZE, torch.bfloat16, "auto", torch.bfloat16)
BLOCK_SIZES = (32, 64, 128, 256)
"""vLLM's CPU backend takes multiples of 32, and does not start with others."""


class PackedCache:
    """Two layers whose blocks vLLM's kernel fills, in an order of their own."""

    def __init__(self, block_size: int, seed: int | None, num_tokens: int = NUM_TOKENS) -> None:
        self.block_size = block_size
        self._num_tokens = num_tokens  # those after them are zero
        self.num_blocks = NUM_TOKENS // block_size
        self.caches = {
            name: torch.zeros(
                self.num_blocks + 1, HEADS, block_size, 2 * HEAD_SIZE, dtype=torch.bfloat16
            )
            for name in ("a", "b")
        }
        generator = torch.Generator().manual_seed(block_size)
        self.block_ids = torch.randperm(self.num_blocks + 1, generator=generator)[
            : self.num_blocks
        ].tolist()
        if seed is not None:
            for number, cache in enumerate(self.caches.values()):
                self._fill(cache, seed + number)

    def layout(self, packing: Packing) -> PagedLayout:
        spec = LayerSpec(HEADS, self.block_size, 4 * HEAD_SIZE, packing.planes)
        return PagedLayout.from_kv_caches(self.caches, dict.fromkeys(self.caches, spec))

    def _fill(self, cache: torch.Tensor, seed: int) -> None:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        generator = torch.Generator().manual_seed(seed)
        kv = torch.randn(2, NUM_TOKENS, HEADS, HEAD_SIZE, generator=generator).bfloat16()
        kv[:, self._num_tokens :] = 0
        tokens = torch.arange(NUM_TOKENS)
        slots = torch.tensor(self.block_ids)[tokens // self.block_size] * self.block_size
        view = cache.view(len(cache), HEADS, 2 * self.block_size, HEAD_SIZE)
        isa = _get_attn_isa(torch.bfloat16, self.block_size, HEAD_SIZE, "auto")
        ops.cpu_attn_reshape_and_cache(
            kv[0], kv[1], *view.chunk(2, dim=2), slots + tokens % self.block_size, isa,
            k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
        )  # fmt: skip


GEOMETRY = ChunkGeometry(
    num_tokens=CHUNK,
    layer_start=0,
    layer_widths=(4 * HEAD_SIZE,) * 2,
    shards=(0, 1),
    num_shards_total=HEADS,
    dtype="bfloat16",
)


def buffers(pool: torch.Tensor, block_size: int, planes: tuple[Plane, ...]) -> ChunkBuffers:
    addresses = [chunk.data_ptr() for chunk in pool]
    return ChunkBuffers(GEOMETRY, block_size, addresses, pool, planes=planes)


def store(copier: CpuCopier, cache: PackedCache) -> torch.Tensor:
    packing = find_packing(BF16, cache.block_size, CHUNK)
    pool = torch.zeros(NUM_CHUNKS, GEOMETRY.chunk_bytes, dtype=torch.uint8)
    chunks = buffers(pool, cache.block_size, packing.planes)
    blocks = range(cache.num_blocks)
    copier.copy([BlockCopy(cache.layout(packing), chunks, cache.block_ids, blocks)], "d2h")
    return pool


@pytest.fixture(scope="module")
def copier() -> CpuCopier:
    return CpuCopier()


@pytest.mark.parametrize("reader_block_size", BLOCK_SIZES)
@pytest.mark.parametrize("writer_block_size", BLOCK_SIZES)
def test_blocks_of_one_size_become_those_of_another(
    copier: CpuCopier, writer_block_size: int, reader_block_size: int
) -> None:
    """What is loaded is, byte for byte, what the kernel itself would have put there."""
    writer_packing = find_packing(BF16, writer_block_size, CHUNK)
    reader_packing = find_packing(BF16, reader_block_size, CHUNK)
    assert writer_packing.name == reader_packing.name
    pool = store(copier, PackedCache(writer_block_size, seed=1))
    reader, expected = PackedCache(reader_block_size, None), PackedCache(reader_block_size, seed=1)
    chunks = buffers(pool, reader_block_size, reader_packing.planes)
    blocks = range(reader.num_blocks)
    copier.copy([BlockCopy(chunks, reader.layout(reader_packing), blocks, reader.block_ids)], "h2d")
    for name, cache in expected.caches.items():
        assert cache.count_nonzero() > 0
        assert torch.equal(reader.caches[name].view(torch.int16), cache.view(torch.int16))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("end", [1, 31, 64, 129, CHUNK - 1])
def test_what_follows_a_tail_is_cleared_and_nothing_else(
    copier: CpuCopier, block_size: int, end: int
) -> None:
    """From the tail's end if the kernel keeps tokens in order, else from the end of its block."""
    packing = find_packing(BF16, block_size, CHUNK)
    assert packing.mixed_tokens in (1, block_size)
    cache = PackedCache(block_size, seed=1)
    part = PagedPart(
        GEOMETRY, (cache.layout(packing),), ((0, 1),), mixed_tokens=packing.mixed_tokens
    )
    value = store(copier, cache)[0].numpy()
    kept = -(-end // packing.mixed_tokens) * packing.mixed_tokens
    expected = PackedCache(CHUNK, seed=1, num_tokens=kept)
    part.clear_after(end, value)
    for layer, packed in enumerate(expected.caches.values()):
        start, stop = GEOMETRY.layer_offsets[layer : layer + 2]
        found = torch.from_numpy(value).view(HEADS, GEOMETRY.shard_bytes)[:, start:stop]
        first = packed[expected.block_ids[0]].view(torch.uint8).flatten(1)
        assert torch.equal(found, first)


@pytest.mark.parametrize("scramble", [0, -1])
def test_blocks_that_no_runs_explain_are_moved_as_they_are(
    monkeypatch: pytest.MonkeyPatch, scramble: int
) -> None:
    """vLLM's kernel packs; afterwards one row of K in one block of 32 tokens is reversed."""
    from vllm import _custom_ops as ops

    pack = ops.cpu_attn_reshape_and_cache

    def pack_badly(key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> None:
        pack(key, value, *rest, **options)
        if rest[0].shape[2] == 32:
            rest[0][scramble, :, 0] = rest[0][scramble, :, 0].flip(1)

    good = find_packing(BF16, 32, CHUNK)
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", pack_badly)
    bad = find_packing(BF16, 32, CHUNK)
    assert good.planes
    assert bad.planes == ()
    assert str(bad.name).startswith("blocks of 32: ")
    assert find_packing(BF16, 64, CHUNK) == good


@pytest.mark.parametrize(
    "others",
    [
        [
            CpuAttention(HEAD_SIZE, torch.float32, "auto", torch.float32),
            CpuAttention(128, torch.bfloat16, "auto", torch.bfloat16),
        ],
        pytest.param(
            [
                CpuAttention(HEAD_SIZE, torch.bfloat16, "fp8_e4m3", torch.uint8),
                CpuAttention(HEAD_SIZE, torch.bfloat16, "fp8_e5m2", torch.uint8),
            ],
            marks=NEEDS_FP8_KV,
        ),
    ],
    ids=["16 bits and more", "8 bits"],
)
def test_other_kinds_of_cache_have_other_names(others: list[CpuAttention]) -> None:
    kinds = [BF16, *others]
    packings = [find_packing(kind, 32, CHUNK) for kind in kinds]
    assert len({packing.name for packing in packings}) == len(kinds)
    for kind, packing in zip(kinds, packings, strict=True):
        width = 2 * kind.head_size * kind.storage_dtype.itemsize
        assert sum(plane.token_bytes for plane in packing.planes) in (0, width)
        assert find_packing(kind, 128, CHUNK).name == packing.name or not packing.planes
