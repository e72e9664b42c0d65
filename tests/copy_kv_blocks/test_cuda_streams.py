"""Copies beside other work of a GPU: which waits for which, and when memory may change.

Without a GPU, a rehearsal runs each line; its streams work at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmcache_connector.copy_kv_blocks.copier import BlockCopy, Copier
from tests.support.doubles.copy_reference import Chunks, Paged, chunks, paged, same
from tests.support.doubles.rehearsed_cuda import cuda_copier, is_rehearsal

pytestmark = pytest.mark.cuda

BLOCKS = range(6)
BUSY_CYCLES = 200_000_000
"""About 0.1 s of a GPU."""
OPTIONS: dict[str, dict[str, int]] = {
    "staged": {"direct_min_run_bytes": 1 << 40},
    "many tiles": {"slot_bytes": 1},
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


def store(copier: Copier, cache: Paged, host: Chunks, fence: Any) -> None:
    copier.copy([BlockCopy(cache.layout, host.buffers, BLOCKS, BLOCKS)], "d2h", fence)


def load(copier: Copier, host: Chunks, cache: Paged, fence: Any) -> None:
    copier.copy([BlockCopy(host.buffers, cache.layout, BLOCKS, BLOCKS)], "h2d", fence)


def in_blocks(side: Paged | Chunks) -> list[torch.Tensor]:
    return [layer[: BLOCKS.stop] for layer in side.blocks()]


def test_a_store_waits_for_the_work_before_its_fence(copier: Copier, device: str) -> None:
    cache = cache_of(device)
    host = chunks(cache, num_chunks=3)
    keep_busy()
    cache.memory.fill_(7)
    store(copier, cache, host, copier.fence())
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
    store(copier, source, host, copier.fence())
    expected = in_blocks(host)
    load(copier, host, target, copier.fence())
    host.pool.fill_(0)
    assert same(in_blocks(target), expected)


def test_host_memory_need_not_be_pinned(copier: Copier, device: str) -> None:
    source, target = cache_of(device), cache_of(device, seed=1)
    pinned = chunks(source, num_chunks=3)
    host = Chunks(torch.zeros_like(pinned.pool, pin_memory=False), pinned.geometry, 16)
    store(copier, source, host, copier.fence())
    load(copier, host, target, copier.fence())
    assert same(in_blocks(target), in_blocks(source))


def test_work_queued_after_a_load_reads_its_data(copier: Copier, device: str) -> None:
    source, target = cache_of(device), cache_of(device, seed=1)
    host = chunks(source, num_chunks=3)
    store(copier, source, host, copier.fence())
    for _ in range(5):
        target.memory.zero_()
        load(copier, host, target, copier.fence())
        read = target.memory.clone()  # on the compute stream
        assert same([read], [target.memory])
        assert same(in_blocks(target), in_blocks(source))


def test_stores_and_loads_run_beside_each_other(copier: Copier, device: str) -> None:
    wrong: list[int] = []

    def go(seed: int) -> None:
        source, target = cache_of(device, seed), cache_of(device, seed + 100)
        host = chunks(source, num_chunks=3, seed=seed + 200)
        for _ in range(5):
            store(copier, source, host, copier.fence())
            load(copier, host, target, copier.fence())
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
