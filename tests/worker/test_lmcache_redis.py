"""The plugin inside a real LMCache engine's storage manager, over a real Valkey."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.counters import WriteEnd
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.worker.lmcache_plugs import value_bytes
from lmcache_connector.worker.lmcache_redis import TIER, RedisStoragePlugin
from tests.support.redis.chunks import chunk_key, config
from tests.support.redis.fault_proxy import Fault, Kind, fault_proxy
from tests.support.redis.servers import Server

# LMCache's allocator works in pages; 64 KiB a chunk makes a few hundred fit its smallest pool.
GEOMETRY = ChunkGeometry(16, 0, (512,) * 4, (0, 1), 2, "bfloat16")


def data(index: int) -> bytes:
    return bytes([index + 1]) * GEOMETRY.chunk_bytes


def engine_key(index: int) -> CacheEngineKey:
    return CacheEngineKey("m", 1, 0, int.from_bytes(chunk_key(index), "big"), torch.uint8)


@pytest.fixture(autouse=True)
def own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that other tests start shall not share LMCache's folder of metrics."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")


@pytest.fixture
def valkey(valkey: Server) -> Server:
    """A running Valkey, empty."""
    with valkey.client() as client:
        client.flushall()
    return valkey


class Instance:
    """One serving instance: LMCache's storage manager, its CPU tier, and our plugin."""

    def __init__(self, url: str) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        self.tier = RedisTier(config(url, read_timeout_seconds=0.5), PartGeometries((GEOMETRY,)))
        engine_config = LMCacheEngineConfig.from_defaults(
            chunk_size=GEOMETRY.num_tokens,
            local_cpu=True,
            max_local_cpu_size=0.01,
            py_enable_gc=True,
            storage_plugins=["redis"],
            extra_config={
                "storage_plugin.redis.module_path": RedisStoragePlugin.__module__,
                "storage_plugin.redis.class_name": RedisStoragePlugin.__name__,
                TIER: self.tier,
            },
        )
        metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 1, GEOMETRY.num_tokens, 1, GEOMETRY.bytes_per_token),
            chunk_size=GEOMETRY.num_tokens,
        )
        self.manager: Any = StorageManager(engine_config, metadata, EventManager())
        self.cpu = self.manager.storage_backends["LocalCPUBackend"]
        self.plugin: RedisStoragePlugin = self.manager.storage_backends["redis"]

    def allocate(self) -> MemoryObj | None:
        shape = torch.Size([1, 1, GEOMETRY.num_tokens, GEOMETRY.bytes_per_token])
        return self.cpu.allocate(shape, torch.uint8, busy_loop=False)

    def store(self, *indices: int) -> None:
        """As the engine does: allocate, fill, hand over."""
        objects = []
        for index in indices:
            memory = self.allocate()
            assert memory is not None
            value_bytes(memory, GEOMETRY)[:] = data(index)
            objects.append(memory)
        self.manager.batched_put([engine_key(i) for i in indices], objects)

    def load(
        self, *indices: int, seconds: float = 5.0, cancelled: Callable[[], bool] = lambda: False
    ) -> list[bytes | None]:
        """As the engine does: what comes is used, then released."""
        with self.plugin.load_context(time.monotonic() + seconds, cancelled):
            keys = [engine_key(i) for i in indices]
            objects = self.manager.batched_get(keys, location="redis")
        found = [
            None if memory is None else bytes(value_bytes(memory, GEOMETRY)) for memory in objects
        ]
        for memory in objects:
            if memory is not None:
                memory.ref_count_down()
        return found

    def in_cpu(self, index: int) -> bool:
        return bool(self.cpu.contains(engine_key(index)))

    def drop_from_cpu(self, *indices: int) -> None:
        for index in indices:
            self.cpu.remove(engine_key(index))

    def assert_nothing_leaked(self) -> None:
        """Empty, the CPU tier can give all its memory once more."""
        self.cpu.clear()
        assert self.cpu.memory_allocator.memcheck()
        free = 0
        held = []
        while (memory := self.cpu.memory_allocator.allocate(
            torch.Size([1, 1, GEOMETRY.num_tokens, GEOMETRY.bytes_per_token]), torch.uint8
        )) is not None:  # fmt: skip
            held.append(memory)
            free += 1
        for memory in held:
            memory.ref_count_down()
        if not hasattr(self, "capacity"):
            self.capacity = free
        assert free == self.capacity


@contextmanager
def instance(url: str) -> Iterator[Instance]:
    made = Instance(url)
    made.assert_nothing_leaked()  # learns the capacity
    try:
        yield made
        assert made.tier.flush(5.0)
        made.assert_nothing_leaked()
    finally:
        assert made.tier.close(2.0)
        made.manager.close()


def test_one_instance_loads_what_another_stored(valkey: Server) -> None:
    with instance(valkey.url) as one:
        one.store(0, 1, 2)
        assert one.tier.flush(5.0)
        assert one.tier.stats().counts.writes[WriteEnd.WRITTEN] == 3
    with instance(valkey.url) as other:
        assert other.load(0, 1, 2) == [data(0), data(1), data(2)]
        assert all(other.in_cpu(i) for i in range(3)), "kept for the next time"


def test_only_what_the_cpu_tier_lacks_is_fetched(valkey: Server) -> None:
    with instance(valkey.url) as one:
        one.store(0, 1, 2, 3)
        assert one.tier.flush(5.0)
        one.drop_from_cpu(0, 2)
        assert one.load(0, 1, 2, 3) == [data(i) for i in range(4)]
        assert one.tier.stats().counts.chunks_hit == 2


def test_the_first_miss_ends_the_load_and_gives_back_the_rest(valkey: Server) -> None:
    with instance(valkey.url) as one:
        one.store(0, 1, 3, 4)
        assert one.tier.flush(5.0)
        one.drop_from_cpu(0, 1, 3)
        assert one.load(0, 1, 2, 3, 4) == [data(0), data(1), None, None, None]
        assert one.in_cpu(0)
        assert not one.in_cpu(2)


def test_without_memory_a_load_is_short_and_does_not_spin(valkey: Server) -> None:
    with instance(valkey.url) as one:
        one.store(0, 1, 2)
        assert one.tier.flush(5.0)
        one.drop_from_cpu(0, 1, 2)
        held = []
        while (memory := one.allocate()) is not None:
            held.append(memory)
        held.pop().ref_count_down()
        assert one.load(0, 1, 2) == [data(0), None, None]
        for memory in held:
            memory.ref_count_down()


def test_outside_a_load_context_nothing_is_there(valkey: Server) -> None:
    with instance(valkey.url) as one:
        one.store(0)
        assert one.tier.flush(5.0)
        one.drop_from_cpu(0)
        assert one.manager.batched_contains([engine_key(0)])[0] == 0
        assert one.manager.batched_get([engine_key(0)], location="redis") == [None]
        with one.plugin.load_context(time.monotonic() + 5.0):
            assert one.manager.batched_contains([engine_key(0)])[0] == 1


def test_deadline_and_cancellation_end_a_load(valkey: Server) -> None:
    with fault_proxy(valkey.port) as proxy, instance(proxy.url) as one:
        one.store(0)
        assert one.tier.flush(5.0)
        one.drop_from_cpu(0)
        assert one.load(0, seconds=-1.0) == [None]
        proxy.arm(Fault(Kind.STALL, sticky=True))
        cancelled = threading.Event()
        threading.Timer(0.05, cancelled.set).start()
        assert one.load(0, seconds=3600.0, cancelled=cancelled.is_set) == [None]


def test_stores_end_once_each_and_say_where_they_begin(valkey: Server) -> None:
    ended: list[tuple[bytes, bool]] = []
    with instance(valkey.url) as one:
        with one.plugin.store_context(7, lambda key, stored: ended.append((key, stored))):
            one.store(0, 1)
        assert one.tier.flush(5.0)
    assert sorted(ended) == sorted([(chunk_key(0), True), (chunk_key(1), True)])


def test_without_a_server_stores_and_loads_give_everything_back() -> None:
    with instance("redis://127.0.0.1:1") as one:
        one.store(0, 1)
        one.drop_from_cpu(0)
        assert one.load(0, 1, seconds=0.5) == [None, None]


def test_lmcache_never_shows_the_secret(valkey: Server, capfd: pytest.CaptureFixture[str]) -> None:
    with valkey.client() as client:
        client.execute_command("ACL", "SETUSER", "u", "on", ">hunter2", "~*", "+@all")
    with instance(f"redis://u:hunter2@127.0.0.1:{valkey.port}") as one:
        one.store(0)
        assert one.tier.flush(5.0)
        assert one.tier.stats().counts.writes[WriteEnd.WRITTEN] == 1
    shown = capfd.readouterr()
    assert "hunter2" not in shown.out + shown.err
