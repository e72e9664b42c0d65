"""How vLLM's metrics name the places that hits come from."""

from __future__ import annotations

from typing import Any


def hit_sources(from_memory: int, from_redis: int) -> dict[Any, int]:
    """Tokens by vLLM's ``CacheHitSource``: ``HOST`` for the CPU tier; it has no word for a store
    that instances share."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # since 0.32, which alone asks

    sources = {CacheHitSource.HOST: from_memory, CacheHitSource.EXTERNAL_UNSPECIFIED: from_redis}
    return {source: count for source, count in sources.items() if count}
