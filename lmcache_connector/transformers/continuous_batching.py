"""The tiers around the forward passes of transformers' continuous batching.

::

    manager = model.init_continuous_batching(generation_config, batching_config)
    with TieredBatching(manager, {"cpu_gib": 8, "redis_url": "redis://host"}):
        manager.start()
        ...
        manager.stop()

Transformers asks its paged cache for a prompt's prefix when it schedules the prompt, and reports
whole blocks after the pass that filled them. Both calls are forwarded to the tiers: restored KV
goes into the request's own blocks and shortens its prefill. Everything runs on the manager's
thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from lmcache_connector.config import limits
from lmcache_connector.errors import UnsupportedError
from lmcache_connector.stepwise.model_input import Row
from lmcache_connector.stepwise.paged import PagedSequences
from lmcache_connector.stepwise.tiers import Counts, read_settings
from lmcache_connector.threads import computing_alone
from lmcache_connector.transformers.support import check_configuration, find_alteration

try:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
except ImportError as error:
    raise UnsupportedError("TieredBatching needs transformers 5.18 or newer.") from error

logger = logging.getLogger(__name__)

_ENGINE = "transformers"


@dataclass(frozen=True, slots=True)
class _Place:
    """The part of a request that transformers' cache reads when it allocates blocks."""

    request_id: str
    num_tokens: int

    def current_len(self) -> int:
        return self.num_tokens


class TieredBatching(AbstractContextManager["TieredBatching"]):
    """The tiers of one manager that has not started yet, until :meth:`close`.

    ``config``: the keys of ``kv_connector_extra_config``, see docs/settings.md. ``label``: as for
    ``KVTiers``. Raises ``UnsupportedError``, ``ConfigError``, ``LayoutError`` or ``SelfTestError``.
    """

    @computing_alone()  # another thread may generate on all cores
    def __init__(
        self, manager: ContinuousBatchingManager, config: Mapping[str, Any], label: str = ""
    ) -> None:
        model = manager.model
        check_configuration(model)
        if manager.is_running():
            raise UnsupportedError("The manager runs already: make TieredBatching before start().")
        batching = manager.continuous_batching_config
        moves_kv = batching.cpu_offload_space != 0.0
        if batching.use_async_batching or any(batching.cuda_graph_booleans) or moves_kv:
            raise UnsupportedError(
                "TieredBatching needs hooks in every pass, and KV that stays in its blocks: set "
                "use_async_batching and use_cuda_graph to False, and cpu_offload_space to 0."
            )
        settings = read_settings(config)
        if settings.require_cache_salt:
            raise UnsupportedError(
                "Requests to TieredBatching carry no cache_salt: leave require_cache_salt out."
            )
        processor = manager._create_batch_processor()
        cache = processor.cache
        if set(cache.cache_allocators) != {FULL_ATTENTION} or not cache.use_prefix_sharing:
            raise UnsupportedError(
                "TieredBatching needs layers of full attention alone, and allow_block_sharing."
            )
        manager.batch_processor = processor  # used by start()
        self._manager = manager
        self._cache = cache
        self._allocator = cache.cache_allocators[FULL_ATTENTION]
        self._device = model.device
        self._stream = processor.inputs_and_outputs.compute_stream
        name = f"{_ENGINE} {version(_ENGINE)} paged"
        self._paged = PagedSequences(settings, name, None, model, _layers(self._allocator), label)
        self._whole: dict[str, int] = {}
        """Tokens in whole blocks of each request that uses the tiers; the others bypass them."""
        self._closing = threading.RLock()
        self._cache.search_prefix_match = self._restore
        self._cache.mark_complete_blocks = self._keep
        self._hooks: tuple[Any, ...] = (
            model.register_forward_pre_hook(self._begins, with_kwargs=True),
            model.register_forward_hook(self._ended, with_kwargs=True),
        )
        logger.info("TieredBatching: %s", self._paged.tiers)

    @property
    def counts(self) -> Counts:
        return self._paged.tiers.counts

    def close(self) -> None:
        """Stop a running manager, whose requests then fail. Write what is queued for Redis, within
        5 s, detach from the manager, and release memory and threads. Idempotent."""
        with self._closing:
            if not self._hooks:
                return
            if self._manager.is_running():
                timeout = limits.SHUTDOWN_SECONDS
                self._manager.stop(block=True, timeout=timeout, hard_stop=True)
            for hook in self._hooks:
                hook.remove()
            for name in ("search_prefix_match", "mark_complete_blocks"):
                vars(self._cache).pop(name, None)
            self._paged.tiers.close()
            self._hooks = ()  # last: an interrupted close is called again

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- replacing methods of the paged cache -------------------------------------------------

    def _restore(self, request_id: str, prompt_ids: list[int]) -> int:
        """Number of leading tokens of a prompt being scheduled that have KV in its blocks, shared
        with other requests or restored."""
        shared: int = PagedAttentionCache.search_prefix_match(self._cache, request_id, prompt_ids)
        table = self._allocator.block_table
        self._whole = {each: n for each, n in self._whole.items() if each in table}
        self._is_own_model()
        if self._is_altered():
            return shared
        self._whole[request_id] = shared
        rest = len(prompt_ids) - shared
        if not self._cache.can_store_request_tokens(_Place(request_id, shared), rest):
            return shared
        if self._stream is not None:
            self._stream.synchronize()  # a pass may still read these blocks for another request
        row = _row(prompt_ids, shared, table[request_id], len(prompt_ids))
        restored = self._paged.restore(row)
        self._paged.restored(row, restored)
        if restored == 0:
            self._cache.free_blocks(request_id)  # the request keeps waiting, without blocks
        else:
            self._whole[request_id] = restored
        return restored

    def _keep(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Store completed chunks after a forward pass. Must precede transformers' own method, which
        may replace the request's blocks by others with the same hash."""
        blocks: Sequence[int] = self._allocator.block_table.get(state.request_id, ())
        number = complete_blocks.get(FULL_ATTENTION, 0) * self._allocator.tokens_per_page
        if state.request_id not in self._whole:
            first = (state.current_len() - number) // self._allocator.tokens_per_page
            self._paged.forget(blocks[first:])  # those written; others may share the ones before
        elif number:
            before = self._whole[state.request_id]
            end = before + number
            tokens = (state.initial_tokens + state.generated_tokens)[:end]
            # A request that was put back has its answer among the initial tokens.
            num_prompt_tokens = state._true_initial_tokens or len(state.initial_tokens)
            row = _row(tokens, before, blocks, num_prompt_tokens)
            is_there = end <= len(blocks) * self._allocator.tokens_per_page
            if is_there and (not self._paged.completes_chunks(row) or self._is_own_model()):
                self._whole[state.request_id] = end
                self._paged.keep(row)
                self._paged.tiers.finish_stores()  # transformers may reuse the blocks
        PagedAttentionCache.mark_complete_blocks(self._cache, state, complete_blocks)

    def _is_own_model(self) -> bool:
        """If not, running requests mix KV of two models, and bypass the tiers from now on."""
        is_own = self._paged.is_same_model()
        if not is_own:
            self._whole.clear()
        return is_own

    def _is_altered(self) -> bool:
        """Whether something alters the model's passes. Running requests then bypass the tiers."""
        is_altered = bool(find_alteration(self._manager.model, self._device))
        if is_altered:
            self._whole.clear()
            self._paged.forget_all()
        return is_altered

    # -- around a forward pass -----------------------------------------------------------------

    def _begins(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("cache") is self._cache:
            number = kwargs["input_ids"].shape[1]
            self._is_altered()
            reached = int(kwargs["position_ids"].sum())
            self._paged.tiers.forward_begins(number, max(0, reached // number - number // 2))

    def _ended(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if kwargs.get("cache") is self._cache:
            self._is_altered()  # by another thread, during the pass
            self._paged.tiers.forward_ended()


def _row(
    token_ids: Sequence[int], context_len: int, blocks: Sequence[int], num_prompt_tokens: int
) -> Row:
    """The last token is always computed."""
    tokens = tuple(token_ids)
    return Row(tokens, context_len, tuple(blocks), len(tokens) - 1, None, num_prompt_tokens)


def _layers(allocator: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer, ``[blocks, tokens, heads, head_dim]``. A block is a run of pages, one
    for K and one for V of each layer."""
    stride = allocator.block_physical_stride // allocator.tokens_per_page
    pages = [allocator._kv_page_views[layer] for layer in allocator.layer_indices]
    return [(keys[::stride], values[::stride]) for keys, values in pages]
