"""What the probe writes compresses as KV does, so that it measures how fast such values come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch

from lmcache_connector.net.deadline import never
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.storage.redis.value_readers import ReadResult
from lmcache_connector.storage.redis.write_queue import OnDone
from lmcache_connector.worker.lmcache_start import RankSettings
from lmcache_connector.worker.paged_part import PagedPart
from lmcache_connector.worker.rank_tiers import RankTiers
from lmcache_connector.worker.redis_probe import RedisProbe
from tests.support.clock import wait_until
from tests.support.jobs import one_part, tier_config
from tests.support.redis.chunks import GEOMETRY, chunk_key, config
from tests.support.redis.servers import Server

NUM_CHUNKS = 8


@pytest.mark.parametrize(("codec", "most"), [("none", 1.1), ("blosc2", 0.9)])
def test_a_probe_reads_values_as_they_are_written(
    valkey: Server, codec: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_CONNECT_SECONDS", "_READ_SECONDS"):  # a busy machine may take over a second
        monkeypatch.setattr(f"lmcache_connector.worker.redis_probe.{name}", 20.0)
    tier = RedisTier(config(valkey.url, codec=codec), PartGeometries((GEOMETRY,)))
    probe = RedisProbe(tier, [chunk_key(i) for i in range(NUM_CHUNKS)])
    wait_until(lambda: not probe.is_busy, "the probe does not end")
    measured, *_ = probe.take()
    assert measured.num_bytes == NUM_CHUNKS * GEOMETRY.chunk_bytes
    with valkey.client() as client:
        stored = sum(client.strlen(name) for name in client.keys("lmc:*-*"))
    assert (most - 0.2) * measured.num_bytes < stored < most * measured.num_bytes
    probe.close(1.0)
    assert tier.close(10.0)


class _SilentTier:
    """Brings nothing until the read is cancelled, and says then that it was ``cut_off``, or that
    the chunks are not there."""

    geometries = PartGeometries((GEOMETRY,))

    def __init__(self, *, cut_off: bool) -> None:
        self.num_reads = self.num_puts = 0
        self.is_reading = threading.Event()
        self._cut_off = cut_off

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        cancelled: Callable[[], bool] = never,
    ) -> ReadResult:
        self.num_reads += 1
        self.is_reading.set()
        wait_until(cancelled, "nobody cancels the read")
        return ReadResult([False] * len(keys), 0.0, self._cut_off)

    def put(self, key: bytes, buffer: memoryview, on_done: OnDone, order: int = 0) -> bool:
        self.num_puts += 1
        on_done(True)
        return True


@pytest.mark.parametrize("cut_off", [True, False])
def test_a_probe_that_is_closed_reads_and_writes_nothing_more(cut_off: bool) -> None:
    tier = _SilentTier(cut_off=cut_off)
    keys = [chunk_key(i) for i in range(NUM_CHUNKS)]
    probe = RedisProbe(cast(RedisTier, tier), keys, clock=lambda: 0.0)  # no deadline ever passes
    assert tier.is_reading.wait(5.0)
    probe.close(5.0)
    assert not probe.is_busy
    assert (tier.num_reads, tier.num_puts) == (1, 0)


def test_a_start_told_again_says_nothing_of_a_probe_under_way() -> None:
    """A failure may make the scheduler side ask for the start again, at any time."""
    caches = {f"layers.{i}": torch.zeros((2, 2, 64, 2048), dtype=torch.uint8) for i in range(2)}
    geometry = ChunkGeometry(128, 0, (2048, 2048), (0, 1), 2, "uint8")
    part = PagedPart.from_kv_caches(one_part(geometry, 64)[0], 0, caches)
    tiers = RankTiers(RankSettings(tier_config(0.05)), [part], None)
    measured = tiers.measured
    tiers.probe = RedisProbe(cast(RedisTier, _SilentTier(cut_off=True)), [chunk_key(0)])
    assert tiers.probe.is_busy
    assert tiers.measured == measured
    tiers.stop(5.0)
    tiers.close(5.0, unmap=True)
