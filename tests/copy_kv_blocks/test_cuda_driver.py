"""Calls of CUDA's driver, against a library compiled from CUDA's own header.

The C compiler checks the types on its side; here, every argument must arrive unchanged.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_connector.copy_kv_blocks.cuda_staging import CudaDriver, CudaError

STREAM = 0x7FFF_1234_5678_9ABC
LIBRARY = """
#include <string.h>
#include <cuda.h>
#include <cudaTypedefs.h>
#define STREAM ((CUstream)0x7FFF123456789ABCULL)
#define FIRST_BATCH_VERSION 12080

static _Thread_local CUcontext current;
static int contexts;
int num_batches;

CUresult cuInit(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal != 3) return CUDA_ERROR_INVALID_DEVICE;
    *device = 13;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (device != 13 || contexts++) return CUDA_ERROR_INVALID_DEVICE;
    *context = (CUcontext)&contexts;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return device == 13 && contexts-- == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_INVALID_CONTEXT ? "invalid device context" : NULL;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    if (current != (CUcontext)&contexts) return CUDA_ERROR_INVALID_CONTEXT;
    if (stream && stream != STREAM) return CUDA_ERROR_INVALID_HANDLE;
    memcpy((void *)to, (void *)from, size);
    return CUDA_SUCCESS;
}

static CUresult batch(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                      CUmemcpyAttributes *attributes, size_t *firsts, size_t num_attributes,
                      size_t *failed, CUstream stream) {
    CUmemcpyAttributes plain = {CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    if (num_attributes != 1 || firsts[0] || memcmp(attributes, &plain, sizeof plain) || !failed)
        return CUDA_ERROR_INVALID_VALUE;
    if (!stream || count > 4096) return CUDA_ERROR_INVALID_VALUE;  /* the former as CUDA does */
    num_batches++;
    *failed = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        CUresult result = cuMemcpyAsync(to[i], from[i], sizes[i], stream);
        if (result) return result;
    }
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **found, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    PFN_cuMemcpyBatchAsync_v12080 call = batch;
    int has = DRIVER >= FIRST_BATCH_VERSION && version == FIRST_BATCH_VERSION && !flags
              && !strcmp(name, "cuMemcpyBatchAsync");
    *found = has ? (void *)call : NULL;
    *status = has ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return has ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
"""


@pytest.fixture(params=[12060, 13010])
def library(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ctypes.CDLL:
    """A driver of CUDA 12.6, without batched copies, or of 13.1."""
    triton, compiler = importlib.util.find_spec("triton"), shutil.which("cc")
    if triton is None or triton.origin is None or compiler is None:
        pytest.skip("runs where there is a C compiler, and Triton with CUDA's headers")
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    (tmp_path / "driver.c").write_text(LIBRARY, encoding="utf-8")
    built = tmp_path / "libcuda.so.1"
    options = [f"-I{headers}", f"-DDRIVER={request.param}", "-shared", "-fPIC", "-Wall", "-Werror"]
    subprocess.run([compiler, *options, "-o", built, tmp_path / "driver.c"], check=True)
    load: Callable[[str], Any] = ctypes.CDLL
    loaded = load(str(built))
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": loaded}.__getitem__)
    return loaded  # type: ignore[no-any-return]


def addresses(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([row.ctypes.data for row in rows], np.int64)


def test_every_argument_arrives(library: ctypes.CDLL, request: pytest.FixtureRequest) -> None:
    driver = CudaDriver(3)
    driver.bind()
    source, target = np.arange(80, dtype=np.uint8).reshape(5, 16), np.zeros((5, 16), np.uint8)
    driver.copy(target[0].ctypes.data, source[0].ctypes.data, 16, STREAM)
    sizes = np.array([16, 1, 7, 16], np.int64)
    # Tables are often columns of larger ones.
    to, start, size = np.stack([addresses(target[1:]), addresses(source[1:]), sizes], axis=1).T
    driver.copy_many(to, start, size, STREAM)
    driver.copy_many(to[:0], start[:0], size[:0], STREAM)
    driver.close()
    expected = np.where(np.arange(16) < np.array([16, *sizes])[:, None], source, 0)
    assert (target == expected).all()
    num_batches = ctypes.c_int.in_dll(library, "num_batches").value
    assert num_batches == ("13010" in request.node.name)


@pytest.mark.parametrize("stream", [0, STREAM], ids=["default stream", "stream"])
def test_more_copies_than_one_batch_takes_are_all_made(library: ctypes.CDLL, stream: int) -> None:
    driver = CudaDriver(3)
    driver.bind()
    source = np.random.default_rng(0).integers(256, size=(10_000, 8), dtype=np.uint8)
    target = np.zeros_like(source)
    driver.copy_many(addresses(target), addresses(source), np.full(10_000, 8), stream)
    driver.close()
    assert (target == source).all()


def test_an_error_is_raised_in_words(library: ctypes.CDLL) -> None:
    with pytest.raises(CudaError, match="error 101: unknown error"):
        CudaDriver(4)
    driver, memory = CudaDriver(3), np.zeros(2, np.uint8)
    library.cuCtxSetCurrent(None)  # as on a new thread
    with pytest.raises(CudaError, match="error 201: invalid device context"):
        driver.copy(memory.ctypes.data, memory.ctypes.data + 1, 1, STREAM)
    one = np.array([memory.ctypes.data], np.int64)
    with pytest.raises(CudaError, match="error 201: invalid device context"):
        driver.copy_many(one, one + 1, np.array([1], np.int64), STREAM)
