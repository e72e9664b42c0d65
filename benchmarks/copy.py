"""How close the copy engine comes to the speed of memory.

It copies blocks at random places of a Llama-3-8B's KV cache (32 layers, 8 KV heads of 128, bf16),
compared with one long copy of as many bytes in the same run. All memory is touched before. Compare
runs by ``*_vs_memcpy``: absolute speeds change with the machine's other work.
"""

from __future__ import annotations

import argparse
import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from benchmarks.harness.ratios import Stopwatch
from lmcache_connector.copy_kv_blocks.copier import BlockCopy, Copier, make_copier
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import LayerSpec, PagedLayout
from lmcache_connector.storage.geometry import ChunkGeometry

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
NUM_KV_HEADS, CONTENT_BYTES = 8, 2 * 128 * 2
REHEARSED = "rehearsed"
"""CUDA's copier with host memory and, under TRITON_INTERPRET=1, no compiler: no measurement."""
CHUNK_TOKENS = 256
SPARE_BLOCKS = 1.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", REHEARSED))
    parser.add_argument("--layout", choices=LAYOUTS, default="LBHNC", help="physical order")
    parser.add_argument("--block-size", type=int, default=128, help="tokens per block")
    parser.add_argument("--layers", type=int, default=32, help="of the model")
    parser.add_argument("--mib", type=int, default=512, help="bytes to move, in MiB")
    parser.add_argument(
        "--direct-min-bytes", type=int, help="on CUDA: runs this long are not staged"
    )
    parser.add_argument("--repeats", type=int, default=7, help="measurements, for the medians")


@dataclass(frozen=True)
class Bench:
    """``block_ids`` of ``paged`` are copied to and from all blocks of ``chunks``."""

    copier: Copier
    paged: PagedLayout
    chunks: ChunkBuffers
    pool: torch.Tensor
    block_ids: list[int]

    def d2h(self) -> int:
        blocks = range(self.chunks.num_blocks)
        return self.copier.copy([BlockCopy(self.paged, self.chunks, self.block_ids, blocks)], "d2h")

    def h2d(self) -> int:
        blocks = range(self.chunks.num_blocks)
        return self.copier.copy([BlockCopy(self.chunks, self.paged, blocks, self.block_ids)], "h2d")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Speeds are in GB/s (10**9 bytes); the bytes of a copy count once."""
    is_rehearsal = args.device == REHEARSED
    device = torch.device("cpu" if is_rehearsal else args.device)
    copier = _copier(device, args.direct_min_bytes, is_rehearsal=is_rehearsal)
    bench = _bench(copier, device, args)
    limit_d2h, limit_h2d = _limits(bench, device)
    works = {"memcpy": limit_d2h, "d2h": bench.d2h, "memcpy_h2d": limit_h2d, "h2d": bench.h2d}
    if device.type == "cpu":
        del works["memcpy_h2d"]
    seconds = _medians(works, args.repeats, progress)
    num_bytes = bench.d2h()
    bench.copier.close()
    gbps = {name: num_bytes / taken / 1e9 for name, taken in seconds.items()}
    fields = {f"{name}_gbps": round(speed, 3) for name, speed in gbps.items()}
    return {
        "device": REHEARSED if is_rehearsal else _device_name(device),
        "layout": args.layout,
        "block_size": args.block_size,
        **({"direct_min_bytes": args.direct_min_bytes} if args.direct_min_bytes else {}),
        "mib": num_bytes / 2**20,
        **fields,
        "d2h_vs_memcpy": round(gbps["d2h"] / gbps["memcpy"], 3),
        "h2d_vs_memcpy": round(gbps["h2d"] / gbps.get("memcpy_h2d", gbps["memcpy"]), 3),
    }


def _copier(device: torch.device, direct_min_bytes: int | None, *, is_rehearsal: bool) -> Copier:
    options = {} if direct_min_bytes is None else {"direct_min_run_bytes": direct_min_bytes}
    if is_rehearsal:
        from tests.support.doubles.rehearsed_cuda import rehearsed_copier

        copier: Copier = rehearsed_copier(**options)
        return copier
    if not options:
        return make_copier(device)
    from lmcache_connector.copy_kv_blocks.cuda import CudaCopier  # needs Triton

    return CudaCopier(device, **options)


def _bench(copier: Copier, device: torch.device, args: argparse.Namespace) -> Bench:
    block_size, num_layers = args.block_size, args.layers
    geometry = ChunkGeometry(
        num_tokens=math.lcm(CHUNK_TOKENS, block_size),
        layer_start=0,
        layer_widths=(CONTENT_BYTES,) * num_layers,
        shards=tuple(range(NUM_KV_HEADS)),
        num_shards_total=NUM_KV_HEADS,
        dtype="bfloat16",
    )
    num_chunks = math.ceil(args.mib * 2**20 / geometry.chunk_bytes)
    pool = torch.ones(
        num_chunks, geometry.chunk_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
    )
    chunks = ChunkBuffers(geometry, block_size, [chunk.data_ptr() for chunk in pool], pool)
    num_blocks = int(chunks.num_blocks * SPARE_BLOCKS)
    paged = _paged(device, args.layout, num_layers, num_blocks, block_size)
    block_ids = np.random.default_rng(0).permutation(num_blocks)[: chunks.num_blocks].tolist()
    return Bench(copier, paged, chunks, pool, block_ids)


def _paged(
    device: torch.device, layout: str, num_layers: int, num_blocks: int, block_size: int
) -> PagedLayout:
    """One tensor in the physical order ``layout``, whose layers are as vLLM registers them."""
    sizes = {"L": num_layers, "B": num_blocks, "H": NUM_KV_HEADS, "N": block_size, "C": 256}
    cache = torch.ones([sizes[axis] for axis in layout], dtype=torch.bfloat16, device=device)
    layers = cache.permute([layout.index(axis) for axis in "LBHNC"])
    spec = LayerSpec(NUM_KV_HEADS, block_size, CONTENT_BYTES)
    names = [f"layers.{i}" for i in range(num_layers)]
    return PagedLayout.from_kv_caches(
        dict(zip(names, layers, strict=True)), dict.fromkeys(names, spec)
    )


def _limits(
    bench: Bench, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """One long copy of as many bytes, out of and into the cache's memory."""
    flat = torch.ones_like(bench.pool, device=device, pin_memory=False)
    if device.type == "cpu":
        memcpy = ctypes.CDLL(None).memcpy
        memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        source, target = flat.data_ptr(), bench.pool.data_ptr()
        return (
            lambda: memcpy(target, source, flat.nbytes),
            lambda: memcpy(source, target, flat.nbytes),
        )
    return lambda: bench.pool.copy_(flat), lambda: flat.copy_(bench.pool)


def _medians(
    works: dict[str, Callable[[], object]], repeats: int, progress: Progress
) -> dict[str, float]:
    """Median seconds of each work, measured in turn so that drift affects all alike."""
    watch = Stopwatch()
    for _ in progress.track(watch.rounds(repeats), total=repeats + 1, description="copying"):
        for name, work in works.items():
            watch.time(name, work)
    return watch.medians()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
