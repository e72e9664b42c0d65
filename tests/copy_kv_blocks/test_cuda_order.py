"""Nothing in CUDA's copier may depend on the order of unrelated streams: see `late_streams`.

Rehearsed only. Real streams of a GPU are in `test_cuda_streams`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lmcache_connector.copy_kv_blocks.copier import BlockCopy
from tests.support.doubles.copy_reference import Chunks, Paged, chunks, paged, same
from tests.support.doubles.late_streams import LateDevice
from tests.support.doubles.rehearsed_cuda import is_rehearsal

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not is_rehearsal(), reason="runs under TRITON_INTERPRET=1"),
]

BLOCKS = range(6)
OPTIONS: dict[str, dict[str, int]] = {
    "staged": {"direct_min_run_bytes": 1 << 40},
    "many tiles": {"direct_min_run_bytes": 1 << 40, "slot_bytes": 1},
    "direct": {"direct_min_run_bytes": 1},
}


@pytest.fixture(params=range(8))
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice(request.param)
    device.install(monkeypatch)
    return device


@pytest.fixture(params=OPTIONS, ids=str)
def copier(request: pytest.FixtureRequest, late: LateDevice) -> Any:
    from lmcache_connector.copy_kv_blocks.cuda import CudaCopier

    return CudaCopier(torch.device("cpu"), **OPTIONS[request.param])


def cache_of(seed: int = 0) -> Paged:
    return paged("LBNHC", layers=1, blocks=8, heads=2, tokens=4, content=16, seed=seed)


def store(copier: Any, cache: Paged, host: Chunks) -> None:
    copier.copy([BlockCopy(cache.layout, host.buffers, BLOCKS, BLOCKS)], "d2h", copier.fence())


def load(copier: Any, host: Chunks, cache: Paged) -> None:
    copier.copy([BlockCopy(host.buffers, cache.layout, BLOCKS, BLOCKS)], "h2d", copier.fence())


def in_blocks(side: Paged | Chunks) -> list[torch.Tensor]:
    return [layer[: BLOCKS.stop] for layer in side.blocks()]


def test_no_copy_overtakes_its_fence(copier: Any, late: LateDevice) -> None:
    """Passes write before a store and before a load. Each has ended when the copy begins, and each
    copy when it returns."""
    source, target = cache_of(), cache_of(seed=1)
    host = chunks(source, num_chunks=3)
    for value in (7, 8):
        late.give(partial(source.memory.fill_, value))
        store(copier, source, host)
        assert all(bool((layer == value).all()) for layer in in_blocks(host))
        late.give(target.memory.zero_)
        load(copier, host, target)
        host.pool.zero_()
        assert all(bool((layer == value).all()) for layer in in_blocks(target))


def test_tables_that_grow_beside_a_pass_are_read_whole(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their new memory may be that of something that the compute stream still writes to."""
    from lmcache_connector.copy_kv_blocks import cuda

    monkeypatch.setattr(cuda, "TABLE_WORDS", 1)
    copier = cuda.CudaCopier(torch.device("cpu"), direct_min_run_bytes=1 << 40, slot_bytes=1)
    for num_chunks in (1, 3):
        cache = cache_of(num_chunks)
        host = chunks(cache, num_chunks, blocks_per_chunk=2)
        blocks = range(2 * num_chunks)
        fence = copier.fence()
        copier.copy([BlockCopy(cache.layout, host.buffers, blocks, blocks)], "d2h", fence)
        assert same(host.blocks(), [layer[: len(blocks)] for layer in cache.blocks()])


def test_a_fence_is_queried_on_its_device(late: LateDevice) -> None:
    """Otherwise threads of all ranks would take memory of the first GPU."""
    from lmcache_connector.copy_kv_blocks.cuda import CudaCopier

    CudaCopier(torch.device("cpu")).fence().query()
    assert late.asked_on == [torch.device("cpu")]


def test_a_pass_reads_copies_enqueued_before(copier: Any, late: LateDevice) -> None:
    """The pass before still writes to the blocks, and the host waits for neither."""
    target, read = cache_of(1), list[list[int]]()
    hosts, queued = [chunks(target, num_chunks=3) for _ in range(3)], []
    for number, host in enumerate(hosts):
        host.pool.fill_(7 + number)
        late.give(target.memory.zero_)
        blocks = range(2 * number, 2 * number + 2)
        copies = [BlockCopy(host.buffers, target.layout, blocks, blocks)]
        queued.append(copier.enqueue(copies))
        late.give(lambda: read.append([int(block.max()) for block in in_blocks(target)[0]]))
    assert read == []
    assert not any(each.is_done for each in queued)
    late.run_until(lambda: len(read) == len(hosts))
    assert read == [[7, 7, 0, 0, 0, 0], [0, 0, 8, 8, 0, 0], [0, 0, 0, 0, 9, 9]]
    assert all(each.is_done for each in queued)
