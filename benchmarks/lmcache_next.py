"""LMCache's in-process engine compared with two CPU tiers that may follow it, with the same copies.

``today`` is the product's engine, ``manager`` LMCache's next storage manager in this process,
``server`` a client of ``lmcache server``, whose memory is mapped here. All move the chunks of one
prompt between a paged cache and their memory with this project's copier and keys, and compare the
bytes. All memory is touched before: the system hands out pages one by one, which took ten times as
long as the copy. ``store_vs_today`` and ``load_vs_today`` are medians over the rounds, each of
which runs all three in turn.

The server's names of chunks are a chain of hashes over token ids, so a key is sent as eight ids,
after those of all chunks before it.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import Progress

from benchmarks.harness.ratios import median, median_ratio
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.copy_kv_blocks.copier import make_copier
from lmcache_connector.plans import LoadJob, PartRun, StoreJob
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
from lmcache_connector.worker.lmcache_start import RankSettings
from lmcache_connector.worker.paged_part import PagedPart
from tests.support.jobs import at_once, one_part
from tests.support.processes import running_process, wait_until_healthy
from tests.support.redis.servers import free_port

TOKENS, LAYERS = 128, 8
GIB = 1
TIMEOUT_SECONDS = 30.0
_KEY_IDS = struct.Struct(">8I")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chunks", type=int, default=16, help="of a prompt")
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 512, 2048], help="per chunk")
    parser.add_argument("--rounds", type=int, default=20, help="measurements, for the medians")


class Tier(Protocol):
    """Moves the chunks ``keys`` from or to blocks 0, 1, ... of a paged cache."""

    def store(self, keys: Sequence[bytes]) -> None: ...

    def load(self, keys: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


class Today:
    """The product's own engine."""

    def __init__(self, part: PagedPart) -> None:
        settings = RankSettings(ConnectorConfig(cpu_gib=float(GIB), host_sharing=False))
        self._engine = LMCacheEngineAdapter(
            settings, [part], make_copier(torch.device("cpu")), None
        )

    def store(self, keys: Sequence[bytes]) -> None:
        job = StoreJob(1, "r", (_run(keys),))
        (moved,) = self._engine.store(job, at_once(job))
        assert moved.num_chunks == len(keys)

    def load(self, keys: Sequence[bytes]) -> None:
        job = LoadJob(1, "r", (_run(keys),), TIMEOUT_SECONDS, False, 0)
        moved = self._engine.load(job, at_once(job))
        assert sum(each.num_chunks for each in moved) == len(keys)

    def close(self) -> None:
        self._engine.close(0.0)


class Manager:
    """LMCache's storage manager in this process."""

    def __init__(self, part: PagedPart) -> None:
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.config import (
            EvictionConfig,
            L1ManagerConfig,
            L1MemoryManagerConfig,
            StorageManagerConfig,
        )
        from lmcache.v1.distributed.storage_manager import StorageManager

        memory = L1MemoryManagerConfig(GIB << 30, use_lazy=False, init_size_in_bytes=GIB << 30)
        config = StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"))
        self._manager = StorageManager(config)
        memory_of = self._manager.l1_memory_desc
        _touch(np.ctypeslib.as_array((ctypes.c_uint8 * memory_of.size).from_address(memory_of.ptr)))
        self._layout = MemoryLayoutDesc([torch.Size([part.geometry.chunk_bytes])], [torch.uint8])
        self._copy = _copies(part)

    def store(self, keys: Sequence[bytes]) -> None:
        named = self._named(keys)
        objects = self._manager.reserve_write(named, self._layout)
        owners = [objects[name] for name in named]
        self._copy([each.data_ptr for each in owners], owners, True)
        self._manager.finish_write(named)

    def load(self, keys: Sequence[bytes]) -> None:
        from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

        named = self._named(keys)
        spec = PrefetchTaskSpec([GroupedObjectKeys(named, 0, self._layout)])
        found = self._manager.query_prefetch_status(
            self._manager.submit_prefetch_task(spec, skip_l2=True)
        )
        assert found is not None
        assert found.l1_hit_count == len(keys)
        with self._manager.read_prefetched_results(named) as objects:
            assert objects is not None
            self._copy([each.data_ptr for each in objects], objects, False)
        self._manager.finish_read_prefetched(named)

    def close(self) -> None:
        self._manager.close()

    @staticmethod
    def _named(keys: Sequence[bytes]) -> list[Any]:
        from lmcache.v1.distributed.api import ObjectKey

        return [ObjectKey(key, "chunk", 0) for key in keys]


class Server:
    """A client of ``lmcache server`` at ``port``: two requests for a store, four for a load."""

    _INSTANCE = 1

    def __init__(self, part: PagedPart, port: int) -> None:
        from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload
        from lmcache.v1.multiprocess.transport.zmq_impl import create_request_client

        self._client: Any = create_request_client(f"tcp://127.0.0.1:{port}")
        payload = RegisterEngineDrivenContextPayload(
            instance_id=self._INSTANCE,
            model_name="chunk",
            world_size=1,
            block_size=_KEY_IDS.size // 4,
            num_layers=1,
            hidden_dim_size=part.geometry.chunk_bytes,
            dtype_str="uint8",
            use_mla=True,
            num_physical_slots=1,
        )
        told = self._answer(self._client.register_kv_cache_engine_driven_context(payload))
        with Path("/dev/shm", told.shm_name.lstrip("/")).open("r+b") as file:
            self._memory = np.frombuffer(mmap.mmap(file.fileno(), told.pool_size), np.uint8)
        _touch(self._memory)
        self._copy = _copies(part)
        self._number = 0

    def store(self, keys: Sequence[bytes]) -> None:
        name = self._name(keys)
        slots = self._answer(self._client.prepare_store(name, self._INSTANCE)).context["slots"]
        self._copy(self._addresses(slots, len(keys)), self._memory, True)
        assert self._answer(self._client.commit_store(name, self._INSTANCE, b""))

    def load(self, keys: Sequence[bytes]) -> None:
        name = self._name(keys)
        self._answer(self._client.lookup(name.no_worker_id_version(), 1))
        found = self._answer(self._client.wait_prefetch_status(name.request_id, TIMEOUT_SECONDS))
        assert found == len(keys)
        answer = self._answer(self._client.prepare_retrieve(name, self._INSTANCE))
        self._copy(self._addresses(answer.context["slots"], len(keys)), self._memory, False)
        assert self._answer(self._client.commit_retrieve(name, self._INSTANCE))

    def close(self) -> None:
        self._client.close()

    def _name(self, keys: Sequence[bytes]) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        ids = tuple(number for key in keys for number in _KEY_IDS.unpack(key))
        self._number += 1
        return IPCCacheServerKey(
            "chunk", 1, 0, ids, 0, len(ids), f"r{self._number}", num_kv_readers=1
        )

    def _addresses(self, slots: Sequence[dict[str, Any]], num_chunks: int) -> list[int]:
        assert len(slots) == num_chunks
        return [int(self._memory.ctypes.data) + int(slot["offset"]) for slot in slots]

    @staticmethod
    def _answer(future: Any) -> Any:
        return future.result(timeout=TIMEOUT_SECONDS)


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """``store_ms`` and ``load_ms`` are of a whole prompt; the ratios of the last chunk size come
    first."""
    task = progress.add_task("chunk sizes", total=len(args.kib))
    runs = []
    for kib in args.kib:
        runs.append(_measure(kib << 10, args.chunks, args.rounds))
        progress.advance(task)
    last = runs[-1]
    return {
        "chunks": args.chunks,
        "rounds": args.rounds,
        "kv_bytes_equal": True,  # otherwise it would have failed
        **{
            f"{tier}_{way}_vs_today": last[tier][f"{way}_vs_today"]
            for tier in ("manager", "server")
            for way in ("store", "load")
        },
        "runs": runs,
    }


def _measure(chunk_bytes: int, num_chunks: int, rounds: int) -> dict[str, Any]:
    width = chunk_bytes // (LAYERS * TOKENS)
    geometry = ChunkGeometry(TOKENS, 0, (width,) * LAYERS, (0,), 1, "uint8")
    cache = torch.zeros((LAYERS, num_chunks, 1, TOKENS, width), dtype=torch.uint8)
    caches = {f"layers.{i}": cache[i] for i in range(LAYERS)}
    part = PagedPart.from_kv_caches(one_part(geometry, TOKENS)[0], 0, caches)
    taken: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        port = stack.enter_context(_running_server())
        tiers: dict[str, Tier] = {
            "today": Today(part),
            "manager": Manager(part),
            "server": Server(part, port),
        }
        for tier in tiers.values():
            stack.callback(tier.close)
        for number in range(-2, rounds):
            keys = [_key(number, chunk) for chunk in range(num_chunks)]
            for name, tier in tiers.items():
                seconds = _seconds(tier, keys, cache, number)
                if number >= 0:
                    for way, second in seconds.items():
                        taken.setdefault(name, {}).setdefault(way, []).append(second)
    found: dict[str, Any] = {"chunk_kib": chunk_bytes >> 10}
    for name, by_way in taken.items():
        found[name] = {f"{way}_ms": round(1e3 * median(each, 6), 3) for way, each in by_way.items()}
        if name != "today":
            for way, each in by_way.items():
                ratio = median_ratio(each, taken["today"][way])
                found[name][f"{way}_vs_today"] = round(ratio, 2)
    return found


def _seconds(
    tier: Tier, keys: Sequence[bytes], cache: torch.Tensor, number: int
) -> dict[str, float]:
    """Seconds of a store and a load of a prompt. Wrong bytes end the benchmark."""
    cache.copy_(torch.randint(0, 256, cache.shape, dtype=torch.uint8))
    stored = cache.clone()
    begun = time.perf_counter()
    tier.store(keys)
    between = time.perf_counter()
    cache.zero_()
    again = time.perf_counter()
    tier.load(keys)
    ended = time.perf_counter()
    if not torch.equal(cache, stored):
        raise RuntimeError(f"{type(tier).__name__} has loaded other bytes in round {number}")
    return {"store": between - begun, "load": ended - again}


def _touch(memory: npt.NDArray[np.uint8]) -> None:
    memory[:: mmap.PAGESIZE] = 0


def _key(number: int, chunk: int) -> bytes:
    return struct.pack(">iI24x", number, chunk)


def _run(keys: Sequence[bytes]) -> PartRun:
    numbers = tuple(range(len(keys)))
    return PartRun(0, tuple(keys), numbers, (numbers,), parents=(b"", *keys[:-1]))


def _copies(part: PagedPart) -> Callable[[Sequence[int], object, bool], None]:
    """Copies of all chunks of a prompt to or from these addresses, in one call."""
    copier = make_copier(torch.device("cpu"))

    def copy(addresses: Sequence[int], owners: object, to_chunks: bool) -> None:
        run = PartRun(0, (), (), (tuple(range(len(addresses))),))
        copies = part.copies(run, addresses, owners, to_chunks=to_chunks)
        copier.copy(copies, "d2h" if to_chunks else "h2d")

    return copy


@contextmanager
def _running_server() -> Iterator[int]:
    """Yields its port."""
    port, http_port = free_port(), free_port()
    command = [
        *(str(Path(sys.executable).with_name("lmcache")), "server", "--port", str(port)),
        *("--chunk-size", str(_KEY_IDS.size // 4), "--l1-size-gb", str(GIB), "--no-l1-use-lazy"),
        *("--l1-init-size-gb", str(GIB), "--eviction-policy", "LRU", "--http-port", str(http_port)),
        *("--supported-transfer-mode", "engine_driven", "--disable-observability"),
        *("--shm-name", f"lmcache_l1_pool_{port}"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running_process(command, log, None) as process:
            url = f"http://127.0.0.1:{http_port}/healthcheck"
            wait_until_healthy(process, url, 10 * TIMEOUT_SECONDS, log)
            yield port
