"""What the connector does to vLLM's cache manager: after loads that brought less than vLLM was
promised, and before resets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


_TWO_CONNECTORS = (
    "MultiConnector runs two LMCacheTieredConnectors: vLLM tells one of them when it hands a block "
    "out again, and the other would store KV of other requests. Leave one out: one is enough for "
    "memory and Redis, salts keep its tenants apart, and a namespace says which instances share"
)


_ALONE = "_lmcache_connector_alone"


@dataclass(frozen=True, slots=True)
class ShortLoad:
    """Of the request's tokens, the KV of the first ``num_tokens`` is there, a multiple of the block
    size."""

    request: Request
    num_tokens: int


def compute_the_rest(load: ShortLoad, manager: KVCacheManager) -> None:
    """Let vLLM compute what has not arrived. To be called before vLLM learns that the load is over.

    This is what vLLM itself does with a failed load if ``kv_load_failure_policy`` is ``recompute``.
    A chunk that is late or gone is no failure but a miss, and must not end a request under another
    policy: that choice is the user's, for connectors whose KV nobody can recompute, and under
    ``MultiConnector`` a connector has no say in it.
    """
    request = load.request
    if request.is_finished():  # aborted; vLLM frees its blocks
        return
    request.num_computed_tokens = load.num_tokens
    if load.num_tokens:
        manager.record_blocks_for_zeroing(request.request_id, load.num_tokens)
    else:
        manager.free(request)


def before_each_reset(
    manager: KVCacheManager, call: Callable[[], None], *, is_alone: bool = False
) -> None:
    """Have ``call`` made before ``manager`` resets.

    vLLM refuses a reset while a block is in use, and asks its connector only afterwards: what a
    connector holds for a moment must be let go of before that.

    Raises ``UnsupportedError`` if two connectors want to be the one that ``is_alone``.
    """
    if is_alone:
        if _ALONE in vars(manager):
            raise UnsupportedError(_TWO_CONNECTORS)
        setattr(manager, _ALONE, True)
    reset = manager.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        call()
        return bool(reset())

    manager.reset_prefix_cache = reset_prefix_cache
