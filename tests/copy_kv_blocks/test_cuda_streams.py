"""Copies beside other work of a GPU: which waits for which, and when memory may change.

Without a GPU, a rehearsal on the CPU runs each line; its streams execute work immediately. Tests
with a ``late`` device run only there: see `rehearsed_cuda` for its order of unrelated streams.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lmcache_connector.copy_kv_blocks.copier import BlockCopy, Copier
from tests.support import ROOT
from tests.support.doubles.copy_reference import Chunks, Paged, chunks, paged, same
from tests.support.doubles.rehearsed_cuda import RehearsedDevice, cuda_copier, is_rehearsal

pytestmark = pytest.mark.cuda

BLOCKS = range(6)
BUSY_CYCLES = 200_000_000
"""About 0.1 s of a GPU."""
OPTIONS: dict[str, dict[str, int]] = {
    "staged": {"direct_min_run_bytes": 1 << 40},
    "many tiles": {"direct_min_run_bytes": 1 << 40, "slot_bytes": 1},
    "direct": {"direct_min_run_bytes": 1},
}


@pytest.fixture(scope="module", params=OPTIONS, ids=str)
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    copier = cuda_copier(**OPTIONS[request.param])
    yield copier
    copier.close()


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu" if is_rehearsal() else "cuda"


def keep_busy() -> None:
    """Delay the work that follows on the compute stream."""
    if not is_rehearsal():
        torch.cuda._sleep(BUSY_CYCLES)


def cache_of(device: str, seed: int = 0) -> Paged:
    return paged("LBNHC", layers=2, blocks=8, heads=2, content=64, device=device, seed=seed)


def store(copier: Copier, cache: Paged, host: Chunks, fence: Any = None) -> None:
    copies = [BlockCopy(cache.layout, host.buffers, BLOCKS, BLOCKS)]
    copier.copy(copies, "d2h", fence or copier.fence())


def load(copier: Copier, host: Chunks, cache: Paged) -> None:
    copier.copy([BlockCopy(host.buffers, cache.layout, BLOCKS, BLOCKS)], "h2d", copier.fence())


def in_blocks(side: Paged | Chunks) -> list[torch.Tensor]:
    return [layer[: BLOCKS.stop] for layer in side.blocks()]


def test_a_store_waits_for_the_work_before_its_fence(copier: Copier, device: str) -> None:
    cache = cache_of(device)
    host = chunks(cache, num_chunks=3)
    keep_busy()
    cache.memory.fill_(7)
    store(copier, cache, host)
    assert all(bool((layer == 7).all()) for layer in in_blocks(host))


def test_a_copy_waits_for_nothing_after_its_fence(copier: Copier, device: str) -> None:
    cache = cache_of(device)
    host = chunks(cache, num_chunks=3)
    store(copier, cache, host, copier.fence())  # page faults, tables, a compiled kernel
    fence = copier.fence()
    keep_busy()
    after = copier.fence()
    store(copier, cache, host, fence)
    assert after is not None
    assert is_rehearsal() or not after.query(), "it waited for the compute stream"
    assert same(in_blocks(host), in_blocks(cache))


def test_memory_may_change_once_a_copy_has_returned(copier: Copier, device: str) -> None:
    source, target = cache_of(device), cache_of(device, seed=1)
    host = chunks(source, num_chunks=3)
    store(copier, source, host)
    expected = in_blocks(host)
    load(copier, host, target)
    host.pool.fill_(0)
    assert same(in_blocks(target), expected)


def test_host_memory_need_not_be_pinned(copier: Copier, device: str) -> None:
    source, target = cache_of(device), cache_of(device, seed=1)
    pinned = chunks(source, num_chunks=3)
    host = Chunks(torch.zeros_like(pinned.pool, pin_memory=False), pinned.geometry, 16)
    store(copier, source, host)
    load(copier, host, target)
    assert same(in_blocks(target), in_blocks(source))


def test_work_queued_after_a_load_reads_its_data(copier: Copier, device: str) -> None:
    source, target = cache_of(device), cache_of(device, seed=1)
    host = chunks(source, num_chunks=3)
    store(copier, source, host)
    for _ in range(5):
        target.memory.zero_()
        load(copier, host, target)
        read = target.memory.clone()  # on the compute stream
        assert same([read], [target.memory])
        assert same(in_blocks(target), in_blocks(source))


def test_stores_and_loads_run_beside_each_other(copier: Copier, device: str) -> None:
    wrong: list[int] = []

    def go(seed: int) -> None:
        source, target = cache_of(device, seed), cache_of(device, seed + 100)
        host = chunks(source, num_chunks=3, seed=seed + 200)
        for _ in range(5):
            store(copier, source, host)
            load(copier, host, target)
            if not same(in_blocks(target), in_blocks(source)):
                wrong.append(seed)
            target.memory.zero_()

    threads = [threading.Thread(target=go, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    keep_busy()
    for thread in threads:
        thread.join(120.0)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


# -- late devices: work runs when somebody waits for it, and only events make an order ------------


@pytest.fixture(params=range(8))
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RehearsedDevice:
    if not is_rehearsal():
        pytest.skip("runs under TRITON_INTERPRET=1")
    device = RehearsedDevice(request.param, is_late=True)
    device.install(monkeypatch.setattr)
    return device


@pytest.fixture(params=OPTIONS, ids=str)
def late_copier(request: pytest.FixtureRequest, late: RehearsedDevice) -> Any:
    from lmcache_connector.copy_kv_blocks.cuda import CudaCopier

    return CudaCopier(torch.device("cpu"), **OPTIONS[request.param])


def small(seed: int = 0) -> Paged:
    return paged("LBNHC", layers=1, blocks=8, heads=2, tokens=4, content=16, seed=seed)


def test_no_copy_overtakes_its_fence(late_copier: Any, late: RehearsedDevice) -> None:
    """A pass writes before each store and each load. It has ended when the copy begins, and the
    copy has ended when its call returns."""
    source, target = small(), small(seed=1)
    host = chunks(source, num_chunks=3)
    for value in (7, 8):
        late.give(partial(source.memory.fill_, value))
        store(late_copier, source, host)
        assert all(bool((layer == value).all()) for layer in in_blocks(host))
        late.give(target.memory.zero_)
        load(late_copier, host, target)
        host.pool.zero_()
        assert all(bool((layer == value).all()) for layer in in_blocks(target))


def test_tables_that_grow_beside_a_pass_are_read_whole(
    late: RehearsedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their new memory may be that of something that the compute stream still writes to."""
    from lmcache_connector.copy_kv_blocks import cuda

    monkeypatch.setattr(cuda, "TABLE_WORDS", 1)
    copier = cuda.CudaCopier(torch.device("cpu"), direct_min_run_bytes=1 << 40, slot_bytes=1)
    for num_chunks in (1, 3):
        cache = small(num_chunks)
        host = chunks(cache, num_chunks, blocks_per_chunk=2)
        blocks = range(2 * num_chunks)
        fence = copier.fence()
        copier.copy([BlockCopy(cache.layout, host.buffers, blocks, blocks)], "d2h", fence)
        assert same(host.blocks(), [layer[: len(blocks)] for layer in cache.blocks()])


def test_a_fence_is_queried_on_its_device(late: RehearsedDevice) -> None:
    """Otherwise threads of all ranks would take memory of the first GPU."""
    from lmcache_connector.copy_kv_blocks.cuda import CudaCopier

    CudaCopier(torch.device("cpu")).fence().query()
    assert late.asked_on == [torch.device("cpu")]


def test_a_pass_reads_copies_enqueued_before(late_copier: Any, late: RehearsedDevice) -> None:
    """The pass before still writes to the blocks, and the host waits for neither."""
    target, read = small(1), list[list[int]]()
    hosts, queued = [chunks(target, num_chunks=3) for _ in range(3)], []
    for number, host in enumerate(hosts):
        host.pool.fill_(7 + number)
        late.give(target.memory.zero_)
        blocks = range(2 * number, 2 * number + 2)
        copies = [BlockCopy(host.buffers, target.layout, blocks, blocks)]
        queued.append(late_copier.enqueue(copies))
        late.give(lambda: read.append([int(block.max()) for block in in_blocks(target)[0]]))
    assert read == []
    assert not any(each.is_done for each in queued)
    late.run_until(lambda: len(read) == len(hosts))
    assert read == [[7, 7, 0, 0, 0, 0], [0, 0, 8, 8, 0, 0], [0, 0, 0, 0, 9, 9]]
    assert all(each.is_done for each in queued)


_ASSERTS = """
import torch
from tests.copy_kv_blocks.test_cuda_streams import cache_of, cuda_copier, chunks, store

copier, cache = cuda_copier(direct_min_run_bytes=1 << 40), cache_of("cuda")
store(copier, cache, chunks(cache, num_chunks=3))
torch.zeros(1, device="cuda")[torch.ones(1, dtype=torch.long, device="cuda")]
try:
    torch.cuda.synchronize()
except RuntimeError:
    copier.close()
    print("closed")
"""


@pytest.mark.skipif(is_rehearsal(), reason="no device whose context could end")
def test_an_assert_on_the_device_ends_no_process() -> None:
    """PyTorch would abort it when pinned memory is freed, before its user sees the error."""
    cuda_copier().close()  # or there is no GPU
    ended = subprocess.run(
        [sys.executable, "-c", _ASSERTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.stdout == "closed\n", ended.stderr
    assert ended.returncode == 0, ended.stderr
