"""LMCache's server's view of Redis: its own objects, through the adapter that it loads itself."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform.event_notifier import consume_fd

from lmcache_connector.errors import ConfigError
from tests.support.redis.fault_proxy import Fault, FaultProxy, Kind
from tests.support.redis.server_groups import wait_until
from tests.support.redis.servers import Server, running_valkey
from tests.support.redis.values import value_names

PATIENCE_SECONDS = 20.0
SHAPES = {0: torch.Size([2, 4, 16, 32]), 1: torch.Size([2, 2, 16, 32])}
LAYOUTS = {group: MemoryLayoutDesc([shape], [torch.bfloat16]) for group, shape in SHAPES.items()}


@pytest.fixture
def redis(valkey: Server) -> Server:
    with valkey.client() as client:
        client.flushall()
    return valkey


def adapter_config(url: str, **params: Any) -> dict[str, Any]:
    """As ``--l2-adapter`` takes it."""
    return {
        "type": "plugin",
        "module_path": "lmcache_connector.neighbours.lmcache_l2",
        "class_name": "RedisL2Adapter",
        "adapter_params": {"redis_url": url} | params,
    }


@contextmanager
def running_adapter(url: str, **params: Any) -> Iterator[Any]:
    config = PluginL2AdapterConfig.from_dict(adapter_config(url, **params))
    adapter = create_l2_adapter_from_registry(config)
    try:
        yield adapter
    finally:
        adapter.close()


def key(index: int, group: int = 0, salt: str = "", hash_bytes: int = 32) -> ObjectKey:
    return ObjectKey(index.to_bytes(hash_bytes, "big"), "some/model", 1 << 24, group, salt)


def memory(
    group: int = 0,
    seed: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    shape: torch.Size | None = None,
) -> TensorMemoryObj:
    """An object as the server allocates it: empty, or with the content ``seed``."""
    shape = shape or SHAPES[group]
    num_bytes = shape.numel() * 2
    raw = torch.zeros(num_bytes, dtype=torch.uint8)
    if seed is not None:
        data = bytearray(random.Random(seed).randbytes(num_bytes))
        raw = torch.frombuffer(data, dtype=torch.uint8)
    about = MemoryObjMetadata(shape, dtype, 0, num_bytes, 1, shapes=[shape], dtypes=[dtype])
    return TensorMemoryObj(raw, about, None)


def content(obj: TensorMemoryObj) -> bytes:
    return bytes(obj.byte_array)


def ended(fd: int, query: Callable[[], Any]) -> Any:
    """As the server's controllers do: they wait for the descriptor, then ask."""
    until = time.monotonic() + PATIENCE_SECONDS
    while (result := query()) is None:
        assert time.monotonic() < until, "the task does not end"
        if select.select([fd], [], [], 0.2)[0]:
            consume_fd(fd)
    return result


def store(adapter: Any, keys: list[ObjectKey], objects: list[Any]) -> Any:
    task = adapter.submit_store_task(keys, objects)
    done: dict[int, Any] = {}

    def query() -> Any:
        done.update(adapter.pop_completed_store_tasks())
        return done.get(task)

    return ended(adapter.get_store_event_fd(), query)


def look_up(
    adapter: Any,
    keys: list[ObjectKey],
    layouts: Mapping[int, MemoryLayoutDesc] = MappingProxyType(LAYOUTS),
) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, layouts)
    fd = adapter.get_lookup_and_lock_event_fd()
    found = ended(fd, lambda: adapter.query_lookup_and_lock_result(task))
    assert adapter.query_lookup_and_lock_result(task) is None
    return [found.test(i) for i in range(len(keys))]


def load(adapter: Any, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
    task = adapter.submit_load_task(keys, objects)
    hits = ended(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    adapter.submit_unlock(keys)
    return [hits.test(i) for i in range(len(keys))]


def test_a_server_finds_what_another_stored(redis: Server) -> None:
    keys = [key(i, group) for i in range(4) for group in SHAPES]
    objects = [memory(k.object_group_id, seed) for seed, k in enumerate(keys)]
    with running_adapter(redis.url) as one, running_adapter(redis.url) as other:
        stored = store(one, keys, objects)
        assert stored.is_successful()
        assert stored.bytes_transferred() == sum(obj.get_size() for obj in objects)
        wait_until(
            lambda: one.get_usage().total_bytes_used == stored.bytes_transferred(),
            "not accounted for",
        )
        assert look_up(other, [*keys, key(9)]) == [True] * 8 + [False]
        loaded = [memory(k.object_group_id) for k in keys]
        assert load(other, keys, loaded) == [True] * 8
        assert [content(obj) for obj in loaded] == [content(obj) for obj in objects]
        assert other.report_status()["is_healthy"]


def test_a_spoiled_object_is_a_miss(redis: Server) -> None:
    keys = [key(i) for i in range(3)]
    with running_adapter(redis.url) as one, running_adapter(redis.url) as other:
        assert store(one, keys, [memory(0, i) for i in range(3)]).is_successful()
        with redis.client() as client:
            for name in value_names(redis):
                client.setrange(name, 1000, b"\xff\x00\xff\x00\xff")
        assert look_up(other, keys) == [True] * 3
        assert load(other, keys, [memory() for _ in keys]) == [False] * 3


@pytest.mark.parametrize(
    "stranger",
    [
        key(1, salt="tenant"),
        key(1, group=1),
        ObjectKey(key(1).chunk_hash, "other/model", 1 << 24),
        ObjectKey(key(1).chunk_hash, "some/model", 2 << 24),
    ],
    ids=["salt", "group", "model", "rank"],
)
def test_every_field_of_a_key_counts(redis: Server, stranger: ObjectKey) -> None:
    with running_adapter(redis.url) as adapter:
        assert store(adapter, [key(1)], [memory(0, 1)]).is_successful()
        assert look_up(adapter, [stranger, key(1)]) == [False, True]
        loaded = memory(stranger.object_group_id)
        assert load(adapter, [stranger], [loaded]) == [False]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float16, SHAPES[0]), (torch.bfloat16, torch.Size([2, 4, 32, 16]))],
    ids=["dtype", "shape"],
)
def test_equal_bytes_of_another_form_are_not_found(
    redis: Server, dtype: torch.dtype, shape: torch.Size
) -> None:
    """LMCache's keys name neither: float16 KV would be served as bfloat16."""
    other = {0: MemoryLayoutDesc([shape], [dtype])}
    with running_adapter(redis.url) as adapter:
        assert store(adapter, [key(1)], [memory(0, 1)]).is_successful()
        assert look_up(adapter, [key(1)], other) == [False]
        assert load(adapter, [key(1)], [memory(dtype=dtype, shape=shape)]) == [False]
        assert look_up(adapter, [key(1)]) == [True]


def test_strangers_share_nothing(redis: Server) -> None:
    with (
        running_adapter(redis.url, hash_key="a secret of 16 bytes") as one,
        running_adapter(redis.url) as other,
    ):
        assert store(one, [key(1)], [memory(0, 1)]).is_successful()
        assert look_up(other, [key(1)]) == [False]


def test_names_that_can_be_forged_are_not_used(redis: Server) -> None:
    short = key(1, hash_bytes=8)
    with running_adapter(redis.url) as adapter:
        assert not store(adapter, [short], [memory(0, 1)]).is_successful()
        assert look_up(adapter, [short]) == [False]
        assert load(adapter, [short], [memory()]) == [False]
    assert value_names(redis) == []


def test_empty_tasks_end(redis: Server) -> None:
    with running_adapter(redis.url) as adapter:
        assert store(adapter, [], []).is_successful()
        assert look_up(adapter, []) == []
        assert load(adapter, [], []) == []


def test_a_dead_server_costs_hits_only() -> None:
    with (
        running_valkey() as server,
        running_adapter(server.url, redis_timeout_seconds=0.5) as adapter,
    ):
        assert store(adapter, [key(1)], [memory(0, 1)]).is_successful()
        server.kill()
        assert look_up(adapter, [key(1)]) == [False]
        assert load(adapter, [key(1)], [memory()]) == [False]
        assert not store(adapter, [key(2)], [memory(0, 2)]).is_successful()


def test_a_silent_server_holds_up_nothing_for_ever(redis: Server) -> None:
    proxy = FaultProxy(redis.port)
    limits = {"load_deadline_seconds": 1.0, "redis_timeout_seconds": 0.5}
    try:
        with running_adapter(proxy.url, **limits) as adapter:
            assert store(adapter, [key(1)], [memory(0, 1)]).is_successful()
            proxy.arm(Fault(Kind.STALL, sticky=True))
            assert load(adapter, [key(1)], [memory()]) == [False]
            assert not store(adapter, [key(2)], [memory(0, 2)]).is_successful()
    finally:
        proxy.close()


def test_wrong_settings_stop_the_start() -> None:
    config = PluginL2AdapterConfig.from_dict(adapter_config("redis://127.0.0.1:1", namespce="x"))
    with pytest.raises(ConfigError, match="did you mean 'namespace'"):
        create_l2_adapter_from_registry(config)
