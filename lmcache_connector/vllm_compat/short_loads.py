"""Adjusts vLLM's cache manager after loads that brought less than promised, and before resets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_TWO_CONNECTORS = (
    "MultiConnector runs two LMCacheTieredConnectors, and vLLM reports reused blocks to "
    "only one of them, so the other would store KV of other requests. Configure one: it "
    "serves memory and Redis, separates tenants by cache_salt, and shares by namespace"
)
_ALONE = "_lmcache_connector_alone"


@dataclass(frozen=True, slots=True)
class ShortLoad:
    """KV of the request's first ``num_tokens``, whole blocks, has arrived; the rest has not."""

    request: Request
    num_tokens: int


def compute_the_rest(load: ShortLoad, manager: KVCacheManager) -> None:
    """Let vLLM compute the missing tokens. Call it before vLLM learns that the load is over.

    vLLM does the same after a failed load with ``kv_load_failure_policy: recompute``. A late or
    evicted chunk is a miss, not a failure, and must not end a request under another policy. That
    setting is for connectors whose KV cannot be recomputed; under ``MultiConnector`` a connector
    cannot change it.
    """
    request = load.request
    if request.is_finished():  # aborted; vLLM frees its blocks
        return
    request.num_computed_tokens = load.num_tokens
    if load.num_tokens:
        manager.record_blocks_for_zeroing(request.request_id, load.num_tokens)
    else:
        manager.free(request)


def before_each_reset(manager: KVCacheManager, call: Callable[[], None]) -> None:
    """Call ``call`` before each reset of ``manager``.

    vLLM refuses a reset while blocks are in use, and calls its connector only afterwards: blocks
    that a connector pins must be unpinned before. Raises ``UnsupportedError`` for a second
    connector.
    """
    if _ALONE in vars(manager):
        raise UnsupportedError(_TWO_CONNECTORS)
    setattr(manager, _ALONE, True)
    reset = manager.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        call()
        return bool(reset())

    manager.reset_prefix_cache = reset_prefix_cache
