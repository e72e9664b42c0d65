"""What no engine does to its CPU tier by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # vLLM cannot start once lmcache has been imported
    from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter


def empty(engine: LMCacheEngineAdapter) -> None:
    """Remove all chunks, with events."""
    for key in engine.cpu.all_keys():
        engine.cpu.forget(key)
