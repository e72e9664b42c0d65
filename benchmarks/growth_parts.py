"""Single parts of the connector at one size each; :mod:`benchmarks.growth` varies the size."""

from __future__ import annotations

import multiprocessing
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.harness.ratios import median_seconds
from benchmarks.harness.redis_tier import (
    look_up_all,
    lookup_seconds,
    open_lookup,
    open_tier,
    read_all,
    write_all,
)
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.plans import CacheEvent, RankReport
from lmcache_connector.storage.geometry import ChunkGeometry
from tests.support.engines.probe import EngineProbe
from tests.support.redis.servers import Server
from tests.support.redis.slow_proxy import SlowLink, proxy_process

# 64 KiB a chunk: only their number matters here.
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
    """Memory of an index of so many chunks, keys included."""
    tracemalloc.start()
    index = ChunkIndex(world_size=1)
    index.apply(0, _events(0, num_keys))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index._holders) == num_keys
    return float(used)


def event_microseconds(num_keys: int) -> float:
    """Median time of one event, a chunk added or removed, in an index of so many others."""
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
    assert len(index._holders) == num_keys
    return statistics.median(seconds) * 1e6


def fill_index(probe: EngineProbe, num_keys: int) -> None:
    """Add entries to the index of a running engine until it has at least so many chunks."""
    adapter = probe.connector._scheduler
    missing = num_keys - len(adapter.index._holders)
    if missing > 0:
        events = tuple(_events(1 << 40, num_keys))[-missing:]
        adapter.update_from_reports([RankReport(0, events, ())])


def _events(first: int, number: int) -> Iterator[CacheEvent]:
    for i in range(first, first + number):
        yield CacheEvent(i.to_bytes(32, "little"), admitted=True)


# -- Redis ---------------------------------------------------------------------------------------


def lookup_round_trips(server: Server, num_chunks: int) -> float:
    """How many round trips a lookup takes on a slow link."""
    keys = _keys(num_chunks)
    _store(server.url, keys)
    link = SlowLink()
    with (
        proxy_process(server.port, link) as port,
        open_lookup(f"redis://127.0.0.1:{port}", SMALL) as lookup,
    ):
        near = lookup_seconds(lookup, keys, 7)
        link.set(latency_seconds=_LATENCY_SECONDS)
        far = lookup_seconds(lookup, keys, 7)
    _flush(server)
    return (far - near) / _LATENCY_SECONDS


def redis_bytes(server: Server, num_chunks: int) -> float:
    """Redis' memory for so many chunks, names and headers included."""
    before = _used_memory(server)
    _store(server.url, _keys(num_chunks))
    used = _used_memory(server) - before
    _flush(server)
    return float(used)


def _keys(number: int) -> list[bytes]:
    return [i.to_bytes(32, "little") for i in range(number)]


def _store(url: str, keys: list[bytes]) -> None:
    chunks = [memoryview(bytearray(key * (SMALL.chunk_bytes // len(key)))) for key in keys]
    with open_tier(url, SMALL) as tier:
        write_all(tier, keys, chunks)


def _used_memory(server: Server) -> int:
    with server.client() as client:
        return int(client.info("memory")["used_memory_dataset"])


def _flush(server: Server) -> None:
    with server.client() as client:
        client.execute_command("FLUSHALL", "SYNC")  # memory is measured next


# -- instances -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """Costs of instances that store, look up and read one prefix at once."""

    redis_bytes: float
    sent_bytes: float
    lookup_commands: float
    read_seconds: float


def instances_on_one_prefix(server: Server, number: int) -> Shared:
    """``number`` processes with a Redis tier each, as instances have."""
    before = _used_memory(server)
    with _instances(server.url, number) as instances, server.client() as client:
        _all(instances, "wait")
        client.config_resetstat()
        _all(instances, "store")
        sent = int(client.info("stats")["total_net_input_bytes"])
        used = _used_memory(server) - before
        client.config_resetstat()
        _all(instances, "look up")
        asked = client.info("commandstats").get("cmdstat_exists", {}).get("calls", 0)
        seconds = median_seconds(lambda: _all(instances, "read"), 5)
    _flush(server)
    return Shared(float(used), float(sent), asked / number, seconds)


@contextmanager
def _instances(url: str, number: int) -> Iterator[list[Connection]]:
    """Processes that execute commands."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(number)]
    processes = [
        context.Process(target=_instance, args=(theirs, url), daemon=True) for _, theirs in pipes
    ]
    for process in processes:
        process.start()
    try:
        yield [mine for mine, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _instance(pipe: Connection, url: str) -> None:
    """The other process: executes one command after the other, and ends if one fails."""
    keys = _keys(PREFIX_CHUNKS)
    targets = [memoryview(bytearray(SMALL.chunk_bytes)) for _ in keys]
    with open_tier(url, SMALL) as tier, open_lookup(url, SMALL) as lookup:
        commands: dict[str, Callable[[], None]] = {
            "wait": lambda: None,
            "store": lambda: _store(url, keys),
            "look up": lambda: look_up_all(lookup, keys),
            "read": lambda: read_all(tier, keys, targets),
        }
        while True:
            commands[pipe.recv()]()
            pipe.send("done")


def _all(instances: list[Connection], command: str) -> None:
    """Send a command to all at once; returns when the last one has ended."""
    for pipe in instances:
        pipe.send(command)
    for pipe in instances:
        if not pipe.poll(_SECONDS):
            raise RuntimeError(f"an instance could not {command}")
        pipe.recv()
