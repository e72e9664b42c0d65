"""The connector's parts alone, measured at one size each; :mod:`benchmarks.growth` varies it."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lmcache_connector.plans import CacheEvent, RankReport
from lmcache_connector.scheduler.chunk_index import ChunkIndex
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from tests.support.probe import EngineProbe
from tests.support.servers import Server
from tests.support.slow_proxy import SlowLink, proxy_process

# 64 KiB a chunk: what grows here is their number.
SMALL = ChunkGeometry(
    num_tokens=256,
    layer_start=0,
    layer_widths=(64,) * 4,
    shards=(0,),
    num_shards_total=1,
    dtype="bfloat16",
)
PREFIX_CHUNKS = 64
_LATENCY_SECONDS = 0.02
_SECONDS = 60.0


# -- the index -----------------------------------------------------------------------------------


def index_bytes(num_keys: int) -> float:
    """Memory of an index that holds so many chunks, keys included."""
    tracemalloc.start()
    index = ChunkIndex(world_size=1)
    index.apply(0, _events(0, num_keys))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == num_keys
    return float(used)


def event_microseconds(num_keys: int) -> float:
    """Median of one chunk that comes and goes, in an index of so many others."""
    index = ChunkIndex(world_size=1)
    index.apply(0, _events(0, num_keys))
    batch = 200
    seconds = []
    for start in range(num_keys, num_keys + 50 * batch, batch):
        events = list(_events(start, batch))
        events += [CacheEvent(event.key, admitted=False) for event in events]
        started = time.perf_counter()
        index.apply(0, events)
        seconds.append((time.perf_counter() - started) / len(events))
    assert len(index) == num_keys
    return statistics.median(seconds) * 1e6


def fill_index(probe: EngineProbe, num_keys: int) -> None:
    """Make the scheduler of a running engine believe in so many chunks, at least."""
    adapter = probe.connector._scheduler
    missing = num_keys - len(adapter.index)
    if missing > 0:
        events = tuple(_events(1 << 40, num_keys))[-missing:]
        adapter.update_from_reports([RankReport(0, events, ())])


def _events(first: int, number: int) -> Iterator[CacheEvent]:
    for i in range(first, first + number):
        yield CacheEvent(i.to_bytes(32, "little"), admitted=True)


# -- Redis ---------------------------------------------------------------------------------------


def lookup_round_trips(server: Server, num_chunks: int) -> float:
    """By the clock: how much longer a look-up takes on a slow link, in that link's round trips."""
    keys = _keys(num_chunks)
    _store(server.url, keys)
    link = SlowLink()
    with proxy_process(server.port, link) as port:
        lookup = RedisLookup(RedisTierConfig(url=f"redis://127.0.0.1:{port}"), [SMALL])
        try:
            near = _lookup_seconds(lookup, keys)
            link.set(latency_seconds=_LATENCY_SECONDS)
            far = _lookup_seconds(lookup, keys)
        finally:
            lookup.close()
    _flush(server)
    return (far - near) / _LATENCY_SECONDS


def redis_bytes(server: Server, num_chunks: int) -> float:
    """What Redis needs for so many chunks, names and headers included."""
    before = _used_memory(server)
    _store(server.url, _keys(num_chunks))
    used = _used_memory(server) - before
    _flush(server)
    return float(used)


def _lookup_seconds(lookup: RedisLookup, keys: list[bytes]) -> float:
    seconds = []
    for i in range(8):
        started = time.perf_counter()
        found = lookup.exists_prefix(keys, time.monotonic() + _SECONDS)
        if i:
            seconds.append(time.perf_counter() - started)
        if found != len(keys):
            raise RuntimeError(f"{found} of {len(keys)} chunks found")
    return statistics.median(seconds)


def _keys(number: int) -> list[bytes]:
    return [i.to_bytes(32, "little") for i in range(number)]


def _store(url: str, keys: list[bytes]) -> None:
    """Returns when all is in Redis, whoever wrote it."""
    tier = RedisTier(RedisTierConfig(url=url), SMALL)
    left = threading.Semaphore(0)
    buffers = [memoryview(bytearray(key * (SMALL.chunk_bytes // len(key)))) for key in keys]
    try:
        for order, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            tier.put(key, buffer, lambda stored: left.release(), order)
        for _ in keys:
            if not left.acquire(timeout=_SECONDS):
                raise RuntimeError("a write does not end")
    finally:
        tier.close(1.0)


def _used_memory(server: Server) -> int:
    with server.client() as client:
        return int(client.info("memory")["used_memory_dataset"])


def _flush(server: Server) -> None:
    with server.client() as client:
        client.execute_command("FLUSHALL", "SYNC")  # memory is looked at next


# -- instances -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """What it took for instances to store, look up and read one prefix, all at once."""

    redis_bytes: float
    sent_bytes: float
    lookup_commands: float
    read_seconds: float


def instances_on_one_prefix(server: Server, number: int) -> Shared:
    """``number`` processes with a Redis tier each, as instances have."""
    before = _used_memory(server)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(number):
        mine, theirs = context.Pipe()
        process = context.Process(target=_instance, args=(theirs, server.url), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    try:
        _all(pipes, "ready")
        _reset_stats(server)
        _all(pipes, "store")
        sent, used = _received_bytes(server), _used_memory(server) - before
        _reset_stats(server)
        _all(pipes, "look up")
        asked = _calls(server, "exists")
        seconds = statistics.median(_timed_all(pipes, "read") for _ in range(5))
    finally:
        for process in processes:
            process.kill()
            process.join()
    _flush(server)
    return Shared(float(used), float(sent), asked / number, seconds)


def _instance(pipe: Connection, url: str) -> None:
    """The other process: one answer per command."""
    config = RedisTierConfig(url=url)
    keys = _keys(PREFIX_CHUNKS)
    tier, lookup = RedisTier(config, SMALL), RedisLookup(config, [SMALL])
    targets = [memoryview(bytearray(SMALL.chunk_bytes)) for _ in keys]

    def read() -> bool:
        return all(tier.read(keys, targets, time.monotonic() + _SECONDS).hits)

    def look_up() -> bool:
        return lookup.exists_prefix(keys, time.monotonic() + _SECONDS) == len(keys)

    def store() -> bool:
        _store(url, keys)
        return True

    commands = {"ready": lambda: True, "store": store, "look up": look_up, "read": read}
    while True:
        pipe.send(commands[pipe.recv()]())


def _all(pipes: list[Connection], command: str) -> None:
    """All at once; returns when the last is done."""
    for pipe in pipes:
        pipe.send(command)
    for pipe in pipes:
        if not pipe.poll(_SECONDS) or not pipe.recv():
            raise RuntimeError(f"an instance could not {command}")


def _timed_all(pipes: list[Connection], command: str) -> float:
    started = time.perf_counter()
    _all(pipes, command)
    return time.perf_counter() - started


def _reset_stats(server: Server) -> None:
    with server.client() as client:
        client.config_resetstat()


def _received_bytes(server: Server) -> int:
    with server.client() as client:
        return int(client.info("stats")["total_net_input_bytes"])


def _calls(server: Server, command: str) -> int:
    with server.client() as client:
        stats: dict[str, Any] = client.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))
