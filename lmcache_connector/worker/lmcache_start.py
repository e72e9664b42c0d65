"""Starts LMCache's engine in vLLM's worker process without side effects on the process."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import TokenDatabase

from lmcache_connector.errors import ConfigError
from lmcache_connector.kv_parts.owners import Owners
from lmcache_connector.threads import start_thread
from lmcache_connector.worker.lmcache_plugs import ValueSizes
from lmcache_connector.worker.offers import Pace

# Per logger, the start of warnings that LMCache logs during normal work, such as one per stored
# chunk when the tier is full.
_ORDINARY = {
    "lmcache.v1.memory_management": "Failed to allocate memory block",
    "lmcache.v1.storage_backend": "The 'memory_allocator' argument is deprecated",
    "lmcache.v1.storage_backend.local_cpu_backend": "Controller message sender is not initialized",
}


def _is_extraordinary(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_ORDINARY[record.name])


for _name in _ORDINARY:
    logging.getLogger(_name).addFilter(_is_extraordinary)

_METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one rank's engine.

    ``rank_gib``: size of its CPU tier. A tenant keeps ``tenant_share`` of it while others need
    memory, and ``pin_share`` may be pinned. ``overrides``: settings of LMCache's own.
    ``report_writes``: record chunks written to Redis. ``pace``: how often chunks are offered to
    Redis again. ``shares_memory``: processes of this host may map the CPU tier. ``announces``: tell
    the scheduler side of evictions before they happen. ``owners``: which rank stores KV that
    several ranks hold; ``None``: this rank stores all of its own.
    """

    rank: int
    world_size: int
    rank_gib: float
    overrides: dict[str, Any] = field(default_factory=dict)
    tenant_share: float = 1.0
    pin_share: float = 0.0
    report_writes: bool = False
    pace: Pace = field(default_factory=Pace)
    shares_memory: bool = False
    announces: bool = False
    owners: Owners | None = None


def make_metadata(settings: EngineSettings, sizes: ValueSizes) -> LMCacheMetadata:
    """Describe a value as plain bytes: one layer, one head, ``unit_bytes`` wide."""
    num_units = sizes.num_units(sizes.geometries.largest)
    return LMCacheMetadata(
        model_name="chunk",  # the model is part of the chunk key
        world_size=settings.world_size,
        local_world_size=settings.world_size,
        worker_id=settings.rank,
        local_worker_id=settings.rank,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, num_units, 1, sizes.unit_bytes),
        use_mla=False,
        role="worker",
        chunk_size=num_units,
    )


def start_engine(
    settings: EngineSettings,
    metadata: LMCacheMetadata,
    database: TokenDatabase,
    connector: GPUConnectorInterface,
) -> LMCacheEngine:
    """Raises :class:`ConfigError` if LMCache cannot allocate the CPU tier."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=metadata.chunk_size,
        local_cpu=True,
        max_local_cpu_size=settings.rank_gib,
        save_unfull_chunk=False,
        cache_policy="LRU",  # replaced by ours
        py_enable_gc=True,  # else LMCache disables garbage collection in the whole process
        lmcache_instance_id=f"rank-{settings.rank}",
        **settings.overrides,
    )
    _let_vllm_start_again()
    with _process_settings_kept():
        engine = LMCacheEngine(config, metadata, database, connector, _no_broadcast, _no_broadcast)
        try:
            _in_daemon_thread(engine.post_init)
        except (AssertionError, RuntimeError) as error:
            names = "".join(f" and lmcache.{name}" for name in settings.overrides)
            raise ConfigError(
                f"LMCache cannot allocate a CPU tier of {settings.rank_gib:g} GiB per rank, from "
                f"cpu_gib{names}: {error}"
            ) from error
    return engine


@contextmanager
def _process_settings_kept() -> Iterator[None]:
    """Undo LMCache's changes to the process, which is vLLM's.

    LMCache forces the start method "spawn", and sets ``PROMETHEUS_MULTIPROC_DIR`` to one folder for
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


def _let_vllm_start_again() -> None:
    """Fix later engine starts in this process. At start, vLLM's CPU build reads the ``__dict__`` of
    every object in every module. LMCache imports numba, and with it a llvmlite object that answers
    any attribute name, ``__dict__`` too, with something that is no dictionary."""
    with suppress(ImportError, AttributeError):  # llvmlite may have changed
        llvm = importlib.import_module("llvmlite.binding.ffi").lib
        llvm._fntab.setdefault("__dict__", {})  # the table of its answers


def _in_daemon_thread(function: Callable[[], None]) -> None:
    """Call ``function`` on a daemon thread, so that LMCache's threads become daemons too. Otherwise
    they would keep alive a process that ends without closing its engine."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    raised: list[Exception] = []

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            function()
        except Exception as error:  # noqa: BLE001 - raised again by the caller's thread
            raised.append(error)

    thread = start_thread("lmc-init", run)
    thread.join()
    if raised:
        raise raised[0]


def _no_broadcast(*_: Any, **__: Any) -> None:
    raise RuntimeError("ranks of this connector never broadcast through LMCache")
