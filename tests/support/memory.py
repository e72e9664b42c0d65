"""What no engine does to its CPU tier by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # vLLM cannot start once lmcache has been imported
    from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter


def empty(engine: LMCacheEngineAdapter) -> None:
    """Remove all chunks, with events."""
    for engine_key in list(engine._cpu.hot_cache):
        engine._cpu.remove(engine_key)


def forget_memory(worker: Any) -> None:
    """Empty the CPU tier of a ``WorkerAdapter`` at once, between two steps with no plan under way.
    No load is planned inside a step before the scheduler side has heard of it."""
    worker._weights.changes.add()
    empty(worker._engine)
