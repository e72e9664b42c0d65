"""KV of a Hugging Face model, kept in the tiers from one ``generate`` to the next.

::

    with KVTiers(model, {"cpu_gib": 4, "redis_url": "redis://host"}) as tiers:
        output = model.generate(**inputs, past_key_values=tiers.new_cache())

Hooks on the model see what each forward pass with such a cache is given. Before it, the longest
stored prefix is put into the cache, and the pass gets the rest of the tokens; after it, chunks that
are whole are stored, by a thread: a ``DynamicCache`` never writes to tensors it has once made. What
is stored is named by the tokens that the model was given, whatever the caller says they are.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from importlib.metadata import version
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from lmcache_connector.stepwise.form import as_blocks
from lmcache_connector.stepwise.identity import ModelIdentity
from lmcache_connector.stepwise.settings import read_settings
from lmcache_connector.stepwise.tiers import Counts, LoadPlan, StuckCopyError, Tiers
from lmcache_connector.transformers.cache import TieredCache
from lmcache_connector.transformers.forward_call import ForwardCall, by_name, without_first
from lmcache_connector.transformers.support import find_form

logger = logging.getLogger(__name__)

_ENGINE = "transformers"
# Whose forward hooks change nothing: they look at outputs, or are these and those of other tiers.
_HARMLESS = ("transformers.", "lmcache_connector.")


class KVTiers:
    """The tiers of one model, until :meth:`close`.

    ``config``: the keys of ``kv_connector_extra_config``, see the README. Reads all weights, and
    computes one token. Not thread-safe: one ``generate`` at a time. Raises ``UnsupportedError``,
    ``ConfigError`` or ``SelfTestError`` for what cannot be served.
    """

    def __init__(self, model: PreTrainedModel, config: Mapping[str, Any]) -> None:
        self._config = read_settings(config)
        self._model = model
        self._form = find_form(model)
        self._device = model.device
        engine = f"{_ENGINE} {version(_ENGINE)}"
        self._identity = ModelIdentity(model, engine, self._form, self._config)
        self._identity.refresh()
        chunk = self._form.empty(self._config.chunk_size, self._device)
        part = self._form.part(chunk, self._config.chunk_size)
        self._tiers = Tiers(self._config, part, self._identity.root)
        self._names = list(inspect.signature(model.forward).parameters)
        self._running: ForwardCall | None = None
        self._hooks: tuple[Any, ...] = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        )
        self._is_told = False
        logger.info("KVTiers: %s", self._tiers)

    def __enter__(self) -> KVTiers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def counts(self) -> Counts:
        """What was looked up, restored and stored so far."""
        return self._tiers.counts

    @property
    def chunk_size(self) -> int:
        """In tokens."""
        return self._config.chunk_size

    def new_cache(self, cache_salt: str | None = None) -> TieredCache:
        """An empty cache for one sequence. Sequences share KV with those of the same salt. Reads
        all weights again if they have changed."""
        self._identity.refresh()
        bypasses = self._config.require_cache_salt and not cache_salt
        keys = None if bypasses else self._identity.keys(cache_salt)
        return TieredCache(self._model.config, keys, self, self._identity.version)

    def finish_stores(self) -> None:
        """Wait until what was computed is in the CPU tier; writes to Redis go on."""
        self._tiers.finish_stores()

    def close(self) -> None:
        """Write what is queued for Redis, within ``shutdown_seconds``, and let go of the model and
        all memory and threads. Idempotent. Caches made here are plain ones afterwards."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = ()
            self._tiers.close()

    # -- hooks ---------------------------------------------------------------------------------

    def _before(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._running = None
        arguments = by_name(self._names, args, kwargs)
        cache = arguments.get("past_key_values")
        if not isinstance(cache, TieredCache) or cache.owner is not self or cache.keys is None:
            return None
        num_cached = len(cache.token_ids)
        cache.keys.shorten(num_cached)  # a pass that failed has left more
        call = ForwardCall.of(arguments, num_cached)
        if call is None or num_cached != cache.get_seq_length() or self._is_altered(cache, call):
            self._pass_by(cache)
            return None
        num_restored = self._restore(cache, call)
        self._running = ForwardCall(call.token_ids[num_restored:], call.num_read)
        left = len(self._running.token_ids)
        self._tiers.forward_begins(left, len(cache.token_ids))
        return ((), without_first(arguments, num_restored)) if num_restored else None

    def _after(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        call, self._running = self._running, None
        if call is None:
            return
        self._tiers.forward_ended()
        cache: TieredCache = by_name(self._names, args, kwargs)["past_key_values"]
        cache.computed(call.token_ids)
        if cache.get_seq_length() != len(cache.token_ids):  # use_cache=False, say
            self._pass_by(cache)
            return
        self._keep(cache)

    def _is_altered(self, cache: TieredCache, call: ForwardCall) -> bool:
        """Whether KV may be other than the model's own. Looked at where several tokens are
        computed: what follows one by one is on top of those."""
        if len(call.token_ids) == 1:
            return False
        return (
            self._model.training
            or self._has_new_weights(cache)
            or torch.is_autocast_enabled(self._device.type)
            or any(
                not hook.__module__.startswith(_HARMLESS)
                for module in self._model.modules()
                for hooks in (module._forward_hooks, module._forward_pre_hooks)
                for hook in hooks.values()
            )
        )

    def _has_new_weights(self, cache: TieredCache) -> bool:
        self._identity.refresh()
        return cache.version != self._identity.version

    def _pass_by(self, cache: TieredCache) -> None:
        cache.pass_by()
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "A sequence passes the KV tiers by: it has more inputs than token ids, or the "
                "model is in training mode, under autocast, has forward hooks of others, or its "
                "weights have changed since new_cache()"
            )

    # -- chunks --------------------------------------------------------------------------------

    def _restore(self, cache: TieredCache, call: ForwardCall) -> int:
        """Put the longest stored prefix into the cache. How many of the call's tokens it has."""
        assert cache.keys is not None
        size, num_cached = self._config.chunk_size, len(cache.token_ids)
        num_tokens = num_cached + len(call.token_ids)
        last = (num_tokens - call.num_read) // size
        if last * size <= num_cached:
            return 0
        cache.keys.extend([*cache.token_ids, *call.token_ids])
        plan = self._tiers.plan(cache.keys.keys[:last], num_cached, num_tokens)
        if plan is None:
            return 0
        restored = self._form.empty(plan.stop * size, self._device)
        end = (plan.first + self._load(plan, restored)) * size
        if end <= num_cached:
            return 0
        if num_cached:
            for new, old in zip(restored, cache.tensors(), strict=True):
                new[:, :, :num_cached] = old
        number = end - num_cached
        cache.put([each[:, :, :end] for each in restored], call.token_ids[:number])
        if cache.num_kept >= plan.first:
            cache.kept(end // size)
        return number

    def _load(self, plan: LoadPlan, restored: list[torch.Tensor]) -> int:
        size = self._config.chunk_size
        part = self._form.part([as_blocks(each, size) for each in restored], size)
        try:
            return self._tiers.load(plan, part, range(plan.first, plan.stop))
        except StuckCopyError:
            logger.exception("KV is computed instead")
            return 0  # nobody else has that memory

    def _keep(self, cache: TieredCache) -> None:
        """Store the chunks that are whole and not stored."""
        assert cache.keys is not None
        size = self._config.chunk_size
        known = len(cache.token_ids)
        end = (known if self._config.store_generated else cache.num_prompt_tokens) // size
        first = cache.num_kept
        if end <= first:
            return
        if self._has_new_weights(cache):
            self._pass_by(cache)
            return
        cache.keys.extend(cache.token_ids)
        blocks = [as_blocks(each.detach(), size) for each in cache.tensors()]
        part = self._form.part(blocks, size)
        self._tiers.store(cache.keys.keys[first:end], first, part, range(first, end))
        cache.kept(end)
