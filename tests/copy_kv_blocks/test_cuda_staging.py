"""Copies through staging slots: planned, rehearsed in Triton's interpreter, compiled for GPUs."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from lmcache_connector.copy_kv_blocks.cuda_staging import covers_chunks, expand, stage
from lmcache_connector.copy_kv_blocks.plan import BlockCopy
from tests.support.doubles.copy_reference import LAYOUTS, chunks, expected_blocks, paged, same
from tests.support.triton import run_python

CPU = torch.device("cpu")
COMPILE = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lmcache_connector.copy_kv_blocks.cuda_gather import _copy_rows
pointers, counts = ("moves", "rows"), ("num_rows", "first_row")
constants = {"WORD": tl.int64, "WORD_BYTES": 8, "RUNS": 16, "WORDS": 64}
signature = dict.fromkeys(pointers, "*i64") | dict.fromkeys(counts, "i32")
signature |= dict.fromkeys(constants, "constexpr")
source = ASTSource(_copy_rows, signature, constants)
print(len(triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32)).asm["cubin"]))
"""


def test_the_tests_for_gpus_are_rehearsed() -> None:
    """A part of them: all take minutes, and run by `make gpu ARGS=--rehearse`."""
    output = run_python(
        *("-m", "pytest", "-c", "tests/copy_kv_blocks/gpu.ini", "tests/copy_kv_blocks"),
        *("-q", "-m", "cuda", "-k", "mla or widths or groups or fence or beside"),
        TRITON_INTERPRET="1",
    )
    counts = re.search(r"(\d+) passed", output)
    assert counts is not None
    assert int(counts[1]) >= 30
    assert "skipped" not in output


@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_the_kernel_compiles_for_gpus(capability: str, tmp_path: Path) -> None:
    output = run_python("-c", COMPILE, capability, TRITON_CACHE_DIR=str(tmp_path))
    assert int(output.split()[-1]) > 1000


def test_tiles_use_the_slots_in_turn() -> None:
    cache = paged("LBHNC", blocks=12)
    host = chunks(cache, num_chunks=5).buffers
    plan = BlockCopy(cache.layout, host, range(10), range(10)).plan(CPU, CPU)
    size = host.geometry.chunk_bytes
    staged = stage([plan], host, True, [1 << 20, 1 << 24], 2 * size + 1)
    assert [tile.slot for tile in staged.tiles] == [0, 1, 0]
    assert [tile.rows for tile in staged.tiles] == [((0, 4),), ((4, 8),), ((8, 10),)]
    places = [copy.staged for tile in staged.tiles for copy in tile.copies]
    assert places == [1 << 20, (1 << 20) + size, 1 << 24, (1 << 24) + size, 1 << 20]
    hosts = [copy.host for tile in staged.tiles for copy in tile.copies]
    assert hosts == sorted(host.addresses.tolist())


def test_only_whole_chunks_are_copied_in_one_piece() -> None:
    cache = paged("LBHNC")
    host = chunks(cache, num_chunks=3).buffers
    whole = BlockCopy(cache.layout, host, range(4), [4, 0, 5, 1]).plan(CPU, CPU)
    assert covers_chunks([whole], host)
    cut = BlockCopy(cache.layout, host, range(3), [4, 0, 5]).plan(CPU, CPU)
    assert not covers_chunks([cut], host)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expanded_runs_match_the_reference(layout: str) -> None:
    cache = paged(layout, tokens=4, content=6)
    host = chunks(cache, num_chunks=2)
    expected = expected_blocks(cache, host, [4, 5, 6], [0, 1, 3])
    plan = BlockCopy(cache.layout, host.buffers, [4, 5, 6], [0, 1, 3]).plan(CPU, CPU)
    runs = expand(plan)
    for src, dst, size in zip(*runs, strict=True):
        ctypes.memmove(int(dst), int(src), int(size))
    assert same(host.blocks(), expected)
    assert runs[2].sum() == plan.num_bytes
