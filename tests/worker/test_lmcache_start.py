"""The CPU tier's memory, which other processes map: LMCache's own chunks, read where they lie."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_connector.peers import commands
from lmcache_connector.peers.host import HostFolder
from lmcache_connector.peers.tier import PeerTier
from lmcache_connector.plans import StoreJob
from lmcache_connector.storage import chunk_codec, compression
from lmcache_connector.storage.chunk_codec import HEADER_BYTES, Buffer, Sealer, ValueHeader
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis import burst
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.worker.lmcache_start import RankSettings
from lmcache_connector.worker.paged_part import PagedPart
from lmcache_connector.worker.rank_tiers import RankTiers
from tests.support.clock import within
from tests.support.integrity import empty
from tests.support.jobs import one_part, tier_config
from tests.support.peers import CONFIG, name_of, serving, topology
from tests.support.processes import open_files
from tests.support.redis.servers import Server
from tests.worker.test_what_is_kept import GEOMETRY, MINE, Rank, run_of

PARTS = PartGeometries((GEOMETRY,))


@contextmanager
def two(path: Path) -> Iterator[tuple[Rank, Rank, PeerTier]]:
    """Two ranks: the second maps the first's memory. `Rank.load` compares every byte."""
    found = topology(path)
    tier = PeerTier(CONFIG, PARTS, found)
    first, second = Rank(shares_memory=True), Rank(peers=tier)
    listener = HostFolder(path).listen(name_of("one"))
    try:
        with serving(first.engine.cpu, ranks=(PARTS,), engine_id="one", listener=listener):
            found.prepare()
            yield first, second, tier
    finally:
        assert tier.close(5.0)
        for rank in (first, second):
            rank.engine.close(1.0)


def test_chunks_are_read_where_lmcache_keeps_them(tmp_path: Path) -> None:
    with two(tmp_path / "host") as (first, second, tier):
        first.store(1, MINE)
        first.store(2, MINE)
        assert within(5.0, lambda: second.load(2, MINE, may_fetch=True) == 4)
        assert second.load(1, MINE, may_fetch=True) == 4
        assert tier.num_mapped == 8
        assert second.engine.cpu.num_chunks == 8, "and kept"
        assert second.load(3, MINE, may_fetch=True) == 0


def test_a_chunk_is_sealed_once_as_long_as_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many read it. One that was evicted and comes back is sealed anew."""
    sealed, encode = list[bytes](), chunk_codec.encode_header

    def counting(header: ValueHeader, stored: Buffer, sealer: Sealer) -> bytes:
        sealed.append(header.key)
        return encode(header, stored, sealer)

    monkeypatch.setattr(commands, "encode_header", counting)
    with two(tmp_path / "host") as (first, second, tier):
        for _ in range(2):
            first.store(1, MINE)
            for _ in range(2):
                assert within(5.0, lambda: second.load(1, MINE, may_fetch=True) == 4)
                empty(second.engine)
            assert not any(tier.counts().misses.values())
            empty(first.engine)
        values = len(list(GEOMETRY.stripes(RedisTierConfig.max_value_bytes - HEADER_BYTES)))
        assert len(sealed) == 2 * 4 * values


def test_others_map_the_memory_for_reading_only() -> None:
    rank = Rank(shares_memory=True)
    descriptor = rank.engine.cpu.memory
    assert descriptor is not None
    size = os.fstat(descriptor).st_size
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, size // 2)
    rank.engine.close(0.0)


def test_a_closed_tier_leaves_no_shared_memory() -> None:
    rank = Rank(shares_memory=True)
    rank.store(1, MINE)
    assert _is_mapped()
    rank.engine.close(0.0)
    assert not _is_mapped()
    assert Rank().engine.cpu.memory is None, "unless it is asked for"


def tiers_of_one(redis: RedisTier | None = None, *, shares: bool = True) -> RankTiers:
    cache = torch.zeros((2, 4, 2, 64, 2048), dtype=torch.uint8)
    part = PagedPart.from_kv_caches(
        one_part(GEOMETRY, 64)[0], 0, {f"layers.{i}": cache[i] for i in range(2)}
    )
    return RankTiers(RankSettings(tier_config(0.05, host_sharing=shares)), [part], redis)


@pytest.mark.parametrize("shares", [True, False])
def test_a_copy_that_a_shutdown_leaves_behind_ends_in_memory_that_is_there(
    monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """Otherwise the copy would crash the process: the user's own, if the engine runs in it."""
    tiers = tiers_of_one(shares=shares)
    address = _address_of(tiers)
    copying, may_go_on, copy = threading.Event(), threading.Event(), tiers.copier.copy

    def slow(*args: Any) -> int:
        copying.set()
        assert may_go_on.wait(30.0)
        return copy(*args)

    monkeypatch.setattr(tiers.copier, "copy", slow)
    tiers.jobs.submit(StoreJob(1, "r", (run_of(1, 4),), is_awaited=True), None)
    assert copying.wait(30.0)
    assert not tiers.stop(0.1)
    tiers.close(0.1, unmap=False)
    assert _is_there(address), "and the copy has not gone on"
    may_go_on.set()
    assert within(30.0, lambda: bool(tiers.jobs.take_ended()))


def test_a_write_that_a_shutdown_leaves_behind_reads_memory_that_is_there(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large value is compressed for longer than a shutdown waits, on a slow machine."""
    redis = RedisTier(RedisTierConfig(valkey.url, codec="blosc2"), PARTS)
    tiers = tiers_of_one(redis)
    address = _address_of(tiers)
    compressing, may_go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        compressing.set()
        assert may_go_on.wait(30.0)
        return compression.compress(*args)

    monkeypatch.setattr(burst, "compress", slow)
    tiers.jobs.submit(StoreJob(1, "r", (run_of(1, 4),), is_awaited=True), None)
    assert compressing.wait(30.0)
    assert tiers.stop(5.0)
    tiers.close(0.1, unmap=True)
    assert _is_there(address), "and the write has not gone on"
    may_go_on.set()
    assert redis.close(30.0)


def _address_of(tiers: RankTiers) -> int:
    """Of the CPU tier's memory."""
    return int(tiers.engine.cpu._backend.memory_allocator.buffer.data_ptr())


def _is_there(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = ([int(end, 16) for end in line.split()[0].split("-")] for line in lines)
    return any(first <= address < last for first, last in ends)


def _is_mapped() -> bool:
    named = "memfd:lmcache-connector"
    maps = Path("/proc/self/maps").read_text()
    return named in maps or any(named in each for each in open_files())
