"""Resets of vLLM's prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import KVCacheManager


def before_each_reset(manager: KVCacheManager, call: Callable[[], None]) -> None:
    """Have ``call`` made before ``manager`` resets.

    vLLM refuses a reset while a block is in use, and asks its connector only afterwards: what a
    connector holds for a moment must be let go of before that.
    """
    reset = manager.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        call()
        return bool(reset())

    manager.reset_prefix_cache = reset_prefix_cache
