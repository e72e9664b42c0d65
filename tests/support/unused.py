"""Chunks that were fetched ahead and that no job has used."""

from __future__ import annotations

from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter


def num_unused(engine: LMCacheEngineAdapter) -> int:
    """Of those that somebody still waits for."""
    with engine._cpu.cpu_lock:
        engine._ledger.settle()
    chunks = engine._ledger._chunks.values()
    return sum(not (chunk.is_claimed or chunk.is_expired) for chunk in chunks)
