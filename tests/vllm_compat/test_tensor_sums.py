"""Digests of tensors on a GPU: the kernel against numpy, interpreted by Triton and on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.triton import run_python

REHEARSAL = """
import torch
from lmcache_connector.vllm_compat.tensor_sums import sums_digest
from tests.vllm_compat.test_tensor_sums import reference_sums
draw = torch.Generator().manual_seed(1)
count = 0
for size in (1, 3, 4, 5, 127, 8191 * 4, 8192 * 4, 8192 * 4 + 1, 3 * 8192 * 4 + 7):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw)
    assert sums_digest(data) == reference_sums(data.numpy().tobytes()), size
    count += 1
for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64):
    data = torch.randint(0, 256, (8 * 5003,), dtype=torch.uint8, generator=draw)
    raw = data.numpy().tobytes()
    assert sums_digest(data.view(dtype).reshape(-1, 5003)) == reference_sums(raw), dtype
    count += 1
print(count)
"""
COMPILE = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lmcache_connector.vllm_compat.tensor_sums import STEPS, _sum_words
constants = {"STEP_0": STEPS[0], "STEP_1": STEPS[1], "N": 8192}
signature = {"words": "*i32", "num_words": "i32", "sums": "*i64"}
signature |= dict.fromkeys(constants, "constexpr")
source = ASTSource(_sum_words, signature, constants)
print(len(triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32)).asm["cubin"]))
"""


def reference_sums(data: bytes) -> bytes:
    """What ``sums_digest`` returns for these bytes, in numpy."""
    from lmcache_connector.vllm_compat.tensor_sums import STEPS

    num_whole = len(data) // 4 * 4
    words = np.frombuffer(data[:num_whole], dtype="<u4").astype(np.uint64)
    at = np.arange(1, len(words) + 1, dtype=np.uint64)
    sums = []
    with np.errstate(over="ignore"):
        for step in STEPS:
            z = words + at * np.uint64(step)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            sums.append((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))
    return np.array(sums, dtype="<u8").tobytes() + data[num_whole:]


def test_the_kernel_sums_as_numpy_does() -> None:
    assert int(run_python("-c", REHEARSAL, TRITON_INTERPRET="1").split()[-1]) == 13


@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_the_kernel_compiles_for_gpus(capability: str, tmp_path: object) -> None:
    output = run_python("-c", COMPILE, capability, TRITON_CACHE_DIR=str(tmp_path))
    assert int(output.split()[-1]) > 1000


def test_the_sums_know_every_word_and_its_place() -> None:
    pytest.importorskip("triton", reason="runs where Triton is installed")
    words = np.arange(1000, dtype="<u4")
    found = {reference_sums(words.tobytes()), reference_sums(words[:-1].tobytes())}
    for change in range(32):
        other = words.copy()
        other[77] ^= np.uint32(1 << change)
        found.add(reference_sums(other.tobytes()))
    swapped = words.copy()
    swapped[[3, 900]] = swapped[[900, 3]]
    found.add(reference_sums(swapped.tobytes()))
    assert len(found) == 35


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [1, 4, 5, 8192 * 4 + 3, (1 << 28) + 2])
def test_a_device_sums_as_numpy_does(size: int) -> None:
    from lmcache_connector.vllm_compat.tensor_digest import tensor_digest

    draw = torch.Generator(device="cuda").manual_seed(size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=draw)
    before = tensor_digest(data)
    assert before == reference_sums(data.cpu().numpy().tobytes())
    data[size // 2] ^= 1
    assert tensor_digest(data) != before
