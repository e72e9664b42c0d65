"""The LMCache engine behind the connector. Only this and its parts import lmcache.

``LMCacheEngine.store`` and ``.retrieve`` run unchanged, with three parts of ours plugged in:

- a token database that names chunks by the keys the scheduler planned (full 256 bits),
- a GPU connector that moves a whole job with one ``copy_kv_blocks`` call,
- the Redis tier, as a storage plugin.

A memory object of LMCache's CPU tier holds one rank's part of one chunk in the canonical form of
:mod:`lmcache_connector.storage.geometry`, as plain bytes.

Threads: ``store`` and ``load`` may run on several job lanes at once; the events come from whichever
thread admits or evicts.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

# LMCache reads these when it is imported. Reports about users' machines go out only if they say so.
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_connector.copy_kv_blocks.copier import Copier, Fence
from lmcache_connector.errors import ConfigError
from lmcache_connector.kv_layout.paged_cache import PagedLayout
from lmcache_connector.plans import CacheEvent, LoadJob, StoreJob
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.worker.lmcache_plugs import (
    BlockCopyConnector,
    EventSink,
    PlannedTokenDatabase,
    PlannedTokens,
    Transfer,
    TransferCancelled,
)

if TYPE_CHECKING:
    from lmcache_connector.storage.redis.tier import RedisTier

logger = logging.getLogger(__name__)

# What LMCache warns of in the course of ordinary work, such as a full tier with every chunk it
# takes in; by logger.
_ORDINARY = {
    "lmcache.v1.memory_management": "Failed to allocate memory block",
    "lmcache.v1.storage_backend": "The 'memory_allocator' argument is deprecated",
    "lmcache.v1.storage_backend.local_cpu_backend": "Controller message sender is not initialized",
}


def _is_extraordinary(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_ORDINARY[record.name])


for _name in _ORDINARY:
    logging.getLogger(_name).addFilter(_is_extraordinary)

_REDIS = "redis"
_PLUGIN_MODULE = "lmcache_connector.storage.redis.lmcache_plugin"
_METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_JOBS_BETWEEN_DRAINS = 256


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """``block_size``: tokens per block of vLLM. ``overrides``: the user's ``lmcache.*`` keys.

    ``report_writes``: remember which chunks have come to Redis.
    """

    rank: int
    world_size: int
    cpu_gib: float
    block_size: int
    overrides: dict[str, Any] = field(default_factory=dict)
    report_writes: bool = False


class LMCacheEngineAdapter:
    """One rank's LMCache engine. ``redis_tier`` is closed with it."""

    def __init__(
        self,
        settings: EngineSettings,
        geometry: ChunkGeometry,
        paged: PagedLayout,
        copier: Copier,
        redis_tier: RedisTier | None,
    ) -> None:
        self._geometry = geometry
        self._redis_tier = redis_tier
        self._jobs_until_drain = _JOBS_BETWEEN_DRAINS
        metadata = _metadata(settings, geometry)
        self._database = PlannedTokenDatabase(metadata)
        connector = BlockCopyConnector(paged, geometry, settings.block_size, copier)
        self._engine = _build_engine(
            _lmcache_config(settings, geometry, redis_tier), metadata, self._database, connector
        )
        backends = self._engine.storage_manager.storage_backends
        self._cpu: LocalCPUBackend = backends["LocalCPUBackend"]
        self._plugin = backends.get(_REDIS)
        if redis_tier is not None and self._plugin is None:
            self.close(0.0)
            raise ConfigError("LMCache did not start the Redis tier; its log says why")
        self._events = EventSink()
        self._report_writes = settings.report_writes
        self._written: deque[bytes] = deque()
        self._cpu.batched_msg_sender = self._events

    def store(self, job: StoreJob, fence: Fence | None, cancelled: threading.Event) -> Transfer:
        """Copy the chunks the CPU tier lacks out of the paged cache; blocks the calling thread.

        Chunks it has are passed over, unless they are to go on to Redis. Raises what the copy
        raises.
        """
        held = {key for key in job.keys if self._holds(key)}
        self._events.confirm(held)
        missing = [i for i, key in enumerate(job.keys) if key not in held]
        per_chunk = len(job.block_ids[0]) // len(job.keys)
        transfer = Transfer(
            keys=tuple(job.keys[i] for i in missing),
            block_ids=tuple(
                b for i in missing for b in job.block_ids[0][i * per_chunk : (i + 1) * per_chunk]
            ),
            skip_blocks=0,
            fence=fence,
            cancelled=cancelled,
        )
        if transfer.keys:
            tokens = PlannedTokens(transfer.keys, self._geometry.num_tokens)
            with self._store_context(job, missing[0]), suppress(TransferCancelled):
                self._engine.store(tokens=tokens, transfer=transfer)
            self._touch(transfer.keys)
            self._drain_statistics()
        if job.redis_keys:
            self._share(job, held)
        return transfer

    def _share(self, job: StoreJob, held: Collection[bytes]) -> None:
        """Queue chunks that were in the CPU tier before the job for Redis."""
        if self._plugin is None:
            return
        for i, key in enumerate(job.keys):
            if key not in held:
                continue
            engine_key = self._database.engine_key(key)
            memory = self._cpu.get_blocking(engine_key)  # with a reference, unless just evicted
            if memory is None:
                continue
            with self._store_context(job, i):
                self._plugin.batched_submit_put_task([engine_key], [memory])
            memory.ref_count_down()

    def load(
        self, job: LoadJob, fence: Fence | None, cancelled: threading.Event, deadline: float
    ) -> Transfer:
        """Copy leading chunks into the paged cache; ``num_chunks`` of the result arrived whole.

        A load that was planned from memory stays there: if a chunk was evicted meanwhile, a slow
        Redis shall not hold up the lane of those that find theirs.
        """
        transfer = Transfer(
            keys=job.keys,
            block_ids=job.block_ids[0],
            skip_blocks=job.skip_blocks,
            fence=fence,
            cancelled=cancelled,
        )
        tokens = PlannedTokens(job.keys, self._geometry.num_tokens)
        if self._plugin is None or not job.needs_redis:
            self._engine.retrieve(tokens, transfer=transfer)
        else:
            with self._plugin.load_context(deadline, cancelled.is_set) as context:
                self._engine.retrieve(tokens, transfer=transfer)
            transfer.redis_bytes = context.redis_bytes
            transfer.redis_seconds = context.redis_seconds
            transfer.redis_failed = context.cut_off and not cancelled.is_set()
        self._touch(job.keys)
        self._drain_statistics()
        if transfer.error is not None and not isinstance(transfer.error, TransferCancelled):
            raise transfer.error
        return transfer

    def forget(self, key: bytes) -> None:
        """Drop a chunk from the CPU tier."""
        self._cpu.remove(self._database.engine_key(key))

    def forget_all(self) -> None:
        """Empty the CPU tier; the events say so."""
        for engine_key in list(self._cpu.hot_cache):
            self._cpu.remove(engine_key)

    @property
    def has_news(self) -> bool:
        """Whether `take_events` or `take_written` would return something."""
        return bool(self._written or self._events.has_news)

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Admissions and evictions of the CPU tier since the last call, in order."""
        return self._events.take()

    def take_written(self) -> tuple[bytes, ...]:
        """Chunks that have come to Redis since the last call, where that is to be reported."""
        written = []
        while self._written:
            written.append(self._written.popleft())
        return tuple(written)

    @property
    def num_chunks(self) -> int:
        """Chunks in the CPU tier."""
        return len(self._cpu.hot_cache)

    def close(self, seconds: float) -> None:
        """Writes still queued for Redis get ``seconds``; then everything is dropped."""
        if self._redis_tier is not None:
            self._redis_tier.close(seconds)
        self._engine.close()

    def _store_context(self, job: StoreJob, first: int) -> AbstractContextManager[None]:
        """Tells the Redis tier where in its prompt a chunk stands: late ones are dropped first."""
        if self._plugin is None:
            return nullcontext()
        on_done = self._write_ended if self._report_writes else None
        context: AbstractContextManager[None] = self._plugin.store_context(
            job.chunk_indices[first], on_done, job.redis_keys
        )
        return context

    def _write_ended(self, key: bytes, stored: bool) -> None:
        if stored:
            self._written.append(key)

    def _holds(self, key: bytes) -> bool:
        return bool(self._cpu.contains(self._database.engine_key(key)))

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Make these the newest chunks of the CPU tier, the prefix newest: it is worth the most."""
        with self._cpu.cpu_lock:
            cache = self._cpu.hot_cache
            for key in reversed(keys):
                engine_key = self._database.engine_key(key)
                if engine_key in cache:
                    cache.move_to_end(engine_key)

    def _drain_statistics(self) -> None:
        """LMCache collects figures per request for a reporter we do not run: throw them away."""
        self._jobs_until_drain -= 1
        if self._jobs_until_drain <= 0:
            self._jobs_until_drain = _JOBS_BETWEEN_DRAINS
            self._engine.stats_monitor.get_stats_and_clear()
            self._cpu.cache_policy.chunk_hash_to_init_timestamp.clear()


def _metadata(settings: EngineSettings, geometry: ChunkGeometry) -> LMCacheMetadata:
    """A chunk is plain bytes to LMCache: one layer, one head, ``bytes_per_token`` wide."""
    return LMCacheMetadata(
        model_name="chunk",  # the model is part of the chunk key
        world_size=settings.world_size,
        local_world_size=settings.world_size,
        worker_id=settings.rank,
        local_worker_id=settings.rank,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, geometry.num_tokens, 1, geometry.bytes_per_token),
        use_mla=False,
        role="worker",
        chunk_size=geometry.num_tokens,
    )


def _lmcache_config(
    settings: EngineSettings, geometry: ChunkGeometry, redis_tier: RedisTier | None
) -> LMCacheEngineConfig:
    values: dict[str, Any] = {
        "chunk_size": geometry.num_tokens,
        "local_cpu": True,
        "max_local_cpu_size": settings.cpu_gib,
        "save_unfull_chunk": False,
        "py_enable_gc": True,  # otherwise it disables the garbage collector of the whole process
        "lmcache_instance_id": f"rank-{settings.rank}",
    }
    extra: dict[str, Any] = {}
    if redis_tier is not None:
        values["storage_plugins"] = [_REDIS]
        extra |= {
            f"storage_plugin.{_REDIS}.module_path": _PLUGIN_MODULE,
            f"storage_plugin.{_REDIS}.class_name": "RedisStoragePlugin",
            "lmcache_connector.redis_tier": redis_tier,
        }
    overrides = dict(settings.overrides)
    extra |= overrides.pop("extra_config", {})
    clash = sorted(values.keys() & overrides.keys())
    if clash:
        raise ConfigError(f"lmcache.{clash[0]} is set by the connector itself; leave it out")
    try:
        return LMCacheEngineConfig.from_defaults(**values, **overrides, extra_config=extra or None)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"LMCache refuses the lmcache.* settings: {error}") from error


def _build_engine(
    config: LMCacheEngineConfig,
    metadata: LMCacheMetadata,
    database: PlannedTokenDatabase,
    connector: BlockCopyConnector,
) -> LMCacheEngine:
    with _process_settings_kept():
        engine = LMCacheEngine(config, metadata, database, connector, _no_broadcast, _no_broadcast)
        _in_daemon_thread(engine.post_init)
    return engine


@contextmanager
def _process_settings_kept() -> Iterator[None]:
    """LMCache changes two settings of the whole process, which is not its own but vLLM's.

    It forces the start method "spawn", and it sets ``PROMETHEUS_MULTIPROC_DIR`` to one folder for
    all engines of the machine: servers started from here would add up each other's metrics.
    """
    start_method = multiprocessing.get_start_method(allow_none=True)
    metrics_folder = os.environ.get(_METRICS_FOLDER)
    try:
        yield
    finally:
        multiprocessing.set_start_method(start_method, force=True)
        if metrics_folder is None:
            os.environ.pop(_METRICS_FOLDER, None)


def _in_daemon_thread(function: Callable[[], None]) -> None:
    """Threads are daemons if the thread that starts them is.

    Those of LMCache would otherwise keep a process alive that ends without closing its engine.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    raised: list[Exception] = []

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            function()
        except Exception as error:  # noqa: BLE001 - raised again by the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, name="lmc-init", daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _no_broadcast(*_: Any, **__: Any) -> None:
    raise RuntimeError("ranks of this connector never broadcast through LMCache")
