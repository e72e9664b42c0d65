"""LMCache's own remote connectors, called through its storage manager, for comparison.

Runs in its own process, ``python -m benchmarks.peers.lmcache_remote URL PORT MIB ROUNDS``, which
prints the seconds of each round as JSON and exits by force: closing LMCache 0.5.6's ``redis://``
connector never returns.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

import numpy as np
import redis
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

from benchmarks.harness.ratios import Stopwatch

_SECONDS = 60.0
_TOKENS = 256


def main(url: str, port: int, mib: int, rounds: int) -> None:
    """Time ``rounds`` rounds after an unmeasured one."""
    from benchmarks.redis import make_chunks

    keys, source = make_chunks(mib)
    remote = LMCacheRemote(url, keys, source)
    watch = Stopwatch()
    with redis.Redis(port=port) as client:
        for _ in watch.rounds(rounds):
            client.flushall()
            watch.time("set", remote.set)
            watch.time("get", remote.get)
            remote.check_and_release(source)
    print(json.dumps(watch.seconds), flush=True)


class LMCacheRemote:
    """``source``: chunks of equal size, copied into LMCache's memory before the timing."""

    def __init__(self, url: str, keys: Sequence[bytes], source: Sequence[memoryview]) -> None:
        width = len(source[0]) // _TOKENS
        self._shape = torch.Size([1, 1, _TOKENS, width])
        self._keys = [
            CacheEngineKey("m", 1, 0, int.from_bytes(key[:8], "big"), torch.uint8) for key in keys
        ]
        self._manager: Any = _storage_manager(url, width, 2.2 * sum(map(len, source)) / 2**30)
        backends = self._manager.storage_backends
        (self._name,) = (name for name in backends if name.startswith("RemoteBackend"))
        self._remote = backends[self._name]
        self._cpu = backends["LocalCPUBackend"]
        self._stored = [self._filled(view) for view in source]
        self._loaded: list[MemoryObj | None] = []

    def set(self) -> None:
        """Write all chunks; returns once the last is reported as written."""
        left = threading.Semaphore(0)
        self._remote.batched_submit_put_task(
            self._keys, self._stored, on_complete_callback=lambda key: left.release()
        )
        for _ in self._keys:
            if not left.acquire(timeout=_SECONDS):
                raise RuntimeError("LMCache did not finish its writes")

    def get(self) -> None:
        self._loaded = self._manager.batched_get(self._keys, location=self._name)

    def check_and_release(self, source: Sequence[memoryview]) -> None:
        """Raises ``RuntimeError`` unless the bytes read are those written."""
        loaded, self._loaded = self._loaded, []
        for memory, view in zip(loaded, source, strict=True):
            if memory is None:
                raise RuntimeError("LMCache lost a chunk")
            read = np.frombuffer(_bytes(memory), np.uint64)
            if not np.array_equal(read, np.frombuffer(view, np.uint64)):
                raise RuntimeError("LMCache returned other bytes than it was given")
            read.setflags(write=True)
            read[:: 1 << 13] = 0
            memory.ref_count_down()

    def _filled(self, view: memoryview) -> MemoryObj:
        memory = self._cpu.allocate(self._shape, torch.uint8, busy_loop=False)
        if memory is None:
            raise RuntimeError("LMCache's pool is too small")
        _bytes(memory)[:] = view
        return memory


def _bytes(memory: MemoryObj) -> memoryview:
    return memoryview(memory.byte_array).cast("B")


def _storage_manager(url: str, width: int, gib: float) -> StorageManager:
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=_TOKENS,
        local_cpu=False,
        max_local_cpu_size=gib,
        save_unfull_chunk=False,
        py_enable_gc=True,
        remote_url=url,
        remote_serde="naive",
        blocking_timeout_secs=int(_SECONDS),
        extra_config={"save_chunk_meta": False},
    )
    metadata = LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, _TOKENS, 1, width),
        chunk_size=_TOKENS,
    )
    return StorageManager(config, metadata, EventManager())


if __name__ == "__main__":
    code = 1
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)
