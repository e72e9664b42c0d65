"""The contract of the copy engine: every copier copies every layout byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.copy_kv_blocks.copier import (
    BlockCopy,
    Copier,
    Direction,
    make_copier,
)
from lmcache_connector.copy_kv_blocks.cpu import CpuCopier
from lmcache_connector.copy_kv_blocks.plan import CopyError
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import LayerSpec, PagedLayout, Plane
from lmcache_connector.storage.geometry import ChunkGeometry
from tests.support.doubles.copy_reference import (
    LAYOUTS,
    Chunks,
    Paged,
    chunks,
    expected_blocks,
    paged,
    same,
)
from tests.support.doubles.rehearsed_cuda import cuda_copier, is_rehearsal
from tests.support.torch_threads import one_torch_thread

CUDA_OPTIONS = {
    "cuda": {},
    "cuda-many-tiles": {"slot_bytes": 1},
    "cuda-direct": {"direct_min_run_bytes": 1},
}
COPIERS = [
    "cpu",
    "cpu-streaming",
    *(pytest.param(name, marks=pytest.mark.cuda) for name in CUDA_OPTIONS),
]
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
)


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """The reference's copies are tiny; starting threads takes longer."""
    with one_torch_thread():
        yield


@pytest.fixture(scope="module")
def cpu() -> CpuCopier:
    """Made on first use: it loads numba, which breaks the start of later engines."""
    return CpuCopier(stream_min_job_bytes=0)


@pytest.fixture(scope="module", params=COPIERS)
def copier(request: pytest.FixtureRequest) -> Copier:
    if request.param == "cpu-streaming":
        return cast(Copier, request.getfixturevalue("cpu"))
    if request.param == "cpu":
        return make_copier(torch.device("cpu"))
    return cast(Copier, cuda_copier(**CUDA_OPTIONS[request.param]))


@pytest.fixture(scope="module")
def device(copier: Copier) -> str:
    return "cpu" if isinstance(copier, CpuCopier) or is_rehearsal() else "cuda"


def check_copy(
    copier: Copier, src: Paged | Chunks, dst: Paged | Chunks, ids: list[int], to: list[int]
) -> None:
    """Copy, then compare every byte of both sides with the reference."""
    direction: Direction = "d2h" if isinstance(dst, Chunks) else "h2d"
    expected, source = expected_blocks(src, dst, ids, to), src.blocks()
    gaps = [] if isinstance(dst, Chunks) else [gap_bytes(dst)]
    moved = copier.copy([BlockCopy(space(src), space(dst), ids, to)], direction, copier.fence())
    assert same(dst.blocks(), expected)
    assert same(src.blocks(), source)
    assert moved == sum(layer[0].numel() for layer in source) * len(ids)
    assert same([] if isinstance(dst, Chunks) else [gap_bytes(dst)], gaps)


def space(side: Paged | Chunks) -> PagedLayout | ChunkBuffers:
    return side.layout if isinstance(side, Paged) else side.buffers


def gap_bytes(cache: Paged) -> torch.Tensor:
    """The bytes between the contents of tokens."""
    content = next(iter(cache.specs.values())).content_bytes
    return cache.memory[..., content:].clone()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tokens", "head_size"), [(16, 256), (16, 64), (128, 80), (256, 128)])
def test_store_and_load_every_layout(
    copier: Copier, device: str, layout: str, tokens: int, head_size: int
) -> None:
    cache = paged(layout, tokens=tokens, content=2 * head_size * 2, device=device)
    host = chunks(cache, num_chunks=2)
    check_copy(copier, cache, host, [5, 1, 2, 3], [0, 1, 2, 3])
    other = paged(layout, tokens=tokens, content=2 * head_size * 2, device=device, seed=2)
    check_copy(copier, host, other, [0, 1, 2, 3], [6, 3, 4, 0])


def test_layers_of_different_widths(copier: Copier, device: str) -> None:
    wide, narrow = paged("LBHNC", content=48, device=device), paged("LBNHC", device=device, seed=3)
    caches = {"wide": wide.caches["layers.0"], "narrow": narrow.caches["layers.1"]}
    specs = {"wide": LayerSpec(2, 16, 48), "narrow": LayerSpec(2, 16, 24)}
    mixed = Paged(wide.memory, caches, specs)
    host = chunks(mixed, num_chunks=2)
    check_copy(copier, mixed, host, [5, 6, 1, 0], [0, 1, 2, 3])
    check_copy(copier, host, mixed, [3, 0], [2, 4])


def test_groups_of_one_part_are_copied_together(copier: Copier, device: str) -> None:
    """Layers 0 and 2 are in one KV cache group, layer 1 in another with other blocks."""
    places, ids = [(0, 2), (1,)], [[6, 2, 3, 0, 5, 4], [1, 2, 0, 6, 4, 3]]
    caches = [paged("LBNHC", layers=count, device=device, seed=count) for count in (2, 1)]
    geometry = ChunkGeometry(32, 0, (24,) * 3, (0, 1), 2, "uint8")
    pool = torch.zeros(3, geometry.chunk_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    addresses = [chunk.data_ptr() for chunk in pool]
    views = [ChunkBuffers(geometry, 16, addresses, pool, layers) for layers in places]
    groups = list(zip(caches, views, places, ids, strict=True))
    stored = [BlockCopy(cache.layout, view, of, range(6)) for cache, view, _, of in groups]
    assert copier.copy(stored, "d2h", copier.fence()) == pool.nbytes
    blocks = Chunks(pool, geometry, 16).blocks()
    for cache, _, layers, of in groups:
        sources = cache.blocks()
        assert all(
            torch.equal(blocks[i], each[of]) for i, each in zip(layers, sources, strict=True)
        )
    others = [paged("BLNHC", layers=count, device=device, seed=9) for count in (2, 1)]
    expected = [cache.blocks() for cache in others]
    for wanted, (_, _, layers, of) in zip(expected, groups, strict=True):
        for target, layer in zip(wanted, layers, strict=True):
            target[of[1:]] = blocks[layer][1:]
    loaded = [
        BlockCopy(view, cache.layout, range(1, 6), of[1:])
        for cache, (_, view, _, of) in zip(others, groups, strict=True)
    ]
    copier.copy(loaded, "h2d", copier.fence())
    assert all(same(cache.blocks(), wanted) for cache, wanted in zip(others, expected, strict=True))


@pytest.mark.parametrize(
    ("ids", "to", "message"),
    [
        ([0, 1], [0], "2 source blocks for 1"),
        ([0, 1], [2, 2], "more than once"),
        ([7], [0], "source block ids reach from 7"),
        ([0], [4], "destination block ids reach from 4"),
        ([-1], [0], "from -1"),
        ([0.5], [0], "list of integers"),
        ([True], [0], "list of integers"),
        ([[0]], [0], "list of integers"),
    ],
)
def test_bad_block_lists_move_nothing(
    copier: Copier, device: str, ids: list[int], to: list[int], message: str
) -> None:
    cache = paged("LBHNC", device=device)
    host = chunks(cache, num_chunks=2)
    before = host.pool.clone()
    with pytest.raises(CopyError, match=message):
        copier.copy([BlockCopy(cache.layout, host.buffers, ids, to)], "d2h")
    assert torch.equal(host.pool, before)


def test_layers_that_do_not_fit_are_refused(copier: Copier, device: str) -> None:
    cache = paged("LBHNC", device=device)
    for other, message in (
        (paged("LBHNC", layers=2, device=device), "2 layers|3 source layers for 2"),
        (paged("LBHNC", heads=3, device=device), "2 heads of 24 bytes into 3 heads"),
        (paged("LBHNC", content=26, device=device), "24 bytes into"),
        (paged("LBHNC", tokens=32, device=device), "blocks of 16 tokens into blocks of 32"),
    ):
        with pytest.raises(CopyError, match=message):
            copier.copy([BlockCopy(cache.layout, chunks(other, 1).buffers, [0], [0])], "d2h")


def test_memory_written_twice_is_refused(copier: Copier, device: str) -> None:
    cache = paged("LBHNC", device=device)
    host = chunks(cache, num_chunks=1)
    twice = ChunkBuffers(host.geometry, 16, [host.pool.data_ptr()] * 2, host.pool)
    with pytest.raises(CopyError, match="destination chunks overlap"):
        copier.copy([BlockCopy(cache.layout, twice, [0, 1], [0, 2])], "d2h")


def test_a_further_copier_compiles_nothing(cpu: CpuCopier) -> None:
    """What numba compiles stays in memory until the process ends."""
    assert CpuCopier()._kernel is cpu._kernel


def test_memory_read_and_written_is_refused(cpu: CpuCopier) -> None:
    """On CUDA no memory is on both sides of a copy."""
    cache = paged("LBHNC")
    with pytest.raises(CopyError, match="source and destination overlap"):
        cpu.copy([BlockCopy(cache.layout, cache.layout, [0], [1])], "d2h")


def test_concurrent_copies_do_not_mix(copier: Copier, device: str) -> None:
    caches = [paged("LBNHC", device=device, seed=seed) for seed in range(6)]
    hosts = [chunks(cache, num_chunks=2, seed=9) for cache in caches]
    pairs = list(zip(caches, hosts, strict=True))
    expected = [expected_blocks(cache, host, [4, 2, 6, 1], range(4)) for cache, host in pairs]
    with ThreadPoolExecutor(len(pairs)) as pool:
        for _ in range(20):
            copies = [
                BlockCopy(cache.layout, host.buffers, [4, 2, 6, 1], range(4))
                for cache, host in pairs
            ]
            jobs = [pool.submit(copier.copy, [copy], "d2h") for copy in copies]
            for job in jobs:
                job.result()
    assert all(same(host.blocks(), want) for host, want in zip(hosts, expected, strict=True))


@st.composite
def planes_of(draw: st.DrawFn, content: int) -> tuple[Plane, ...]:
    """The two halves of a token's content, each in some number of runs."""
    half = content // 2
    counts = st.sampled_from([n for n in (1, 2, 4, 50) if half % n == 0])
    return tuple(Plane(n, half // n) for n in (draw(counts), draw(counts)))


@st.composite
def copies(draw: st.DrawFn, device: str) -> tuple[Paged, Chunks, list[int], list[int]]:
    """A cache of any layout and type, with or without gaps or planes, its chunks, and the blocks to
    copy."""
    kernel_tokens, split = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    layout, dtype = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(DTYPES))
    content = draw(st.sampled_from([1, 2, 7, 64, 600])) * dtype.itemsize
    planes: tuple[Plane, ...] = ()
    padding = draw(st.sampled_from([0, 1, 8])) * dtype.itemsize
    if layout.endswith("NC") and padding == 0 and content % 2 == 0 and draw(st.booleans()):
        planes, split = draw(planes_of(content)), 1
    cache = paged(
        layout,
        layers=draw(st.integers(1, 3)),
        blocks=draw(st.integers(1, 6)),
        heads=draw(st.integers(1, 3)),
        tokens=kernel_tokens * split,
        kernel_tokens=kernel_tokens,
        content=content,
        dtype=dtype,
        padding=padding,
        planes=planes,
        device=device,
    )
    num_chunks, per_chunk = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    host = chunks(cache, num_chunks, per_chunk)
    chunk_ids = draw(st.lists(st.integers(0, num_chunks * per_chunk - 1), unique=True))
    num_blocks = next(iter(cache.blocks())).shape[0]
    paged_ids = draw(st.permutations(range(num_blocks)))
    count = min(len(chunk_ids), len(paged_ids))
    return cache, host, list(paged_ids[:count]), chunk_ids[:count]


@settings(max_examples=150)
@given(data=st.data(), store=st.booleans())
def test_random_copies_match_the_reference(
    copier: Copier, device: str, data: st.DataObject, store: bool
) -> None:
    cache, host, paged_ids, chunk_ids = data.draw(copies(device))
    if store:
        check_copy(copier, cache, host, paged_ids, chunk_ids)
    else:
        check_copy(copier, host, cache, chunk_ids, paged_ids)
