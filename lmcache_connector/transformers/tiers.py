"""Keeps the KV of a Hugging Face model in the tiers across calls of ``generate``.

::

    with KVTiers(model, cpu_gib=4, redis_url="redis://host") as tiers:
        output = model.generate(**inputs, past_key_values=tiers.new_cache())

Hooks on the model observe each forward pass with such a cache. Before it, the longest stored prefix
is put into the cache, and the pass gets the remaining tokens. After it, a thread stores completed
chunks, which is safe since a ``DynamicCache`` never writes to existing tensors. Keys are derived
from the tokens that the model was given.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from lmcache_connector.stepwise.form import as_blocks
from lmcache_connector.stepwise.identity import ModelIdentity
from lmcache_connector.stepwise.tiers import Counts, LoadPlan, StuckCopyError, Tiers, read_settings
from lmcache_connector.threads import computing_alone
from lmcache_connector.transformers.cache import ForwardCall, TieredCache, by_name, without_first
from lmcache_connector.transformers.support import find_alteration, find_form

logger = logging.getLogger(__name__)

_ENGINE = "transformers"
_WRITTEN = "its KV was written to, or exchanged, by other code"
_CHANGED = "the model was changed, cast or moved since the sequence began"


class KVTiers(AbstractContextManager["KVTiers"]):
    """The tiers of one model, until :meth:`close`.

    ``config`` and the overriding ``settings``: the keys of ``kv_connector_extra_config``, see
    docs/settings.md. ``label``: your name for the code of a model that is not transformers' own, to
    be changed with the code, since nothing else identifies it. The constructor computes a few
    tokens, and reads all weights unless ``model_digest`` names them. Several threads may generate
    at once; forked processes bypass the tiers. Raises ``UnsupportedError``, ``ConfigError`` or
    ``SelfTestError``.
    """

    @computing_alone()  # another thread may generate on all cores
    def __init__(
        self,
        model: PreTrainedModel,
        config: Mapping[str, Any] | None = None,
        *,
        label: str = "",
        **settings: Any,
    ) -> None:
        if settings or config is None:
            config = {**(config or {}), **settings}
        self._config = read_settings(config)
        self._model = model
        self._form = find_form(model)
        self._device = model.device
        self._process = os.getpid()
        self._lock = threading.RLock()
        engine = f"{_ENGINE} {version(_ENGINE)}"
        self._identity = ModelIdentity(model, engine, self._form, self._config, label=label)
        self._identity.refresh()
        chunk = self._form.empty(self._config.chunk_size, self._device)
        part = self._form.part(chunk, self._config.chunk_size)
        self._tiers = Tiers(self._config, part, self._identity.root)
        self._names = list(inspect.signature(model.forward).parameters)
        self._hooks: tuple[Any, ...] = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        )
        self._told: set[str] = set()
        logger.info("KVTiers: %s", self._tiers)

    def __repr__(self) -> str:
        return f"KVTiers({self._tiers})"

    @property
    def counts(self) -> Counts:
        return self._tiers.counts

    @property
    def chunk_size(self) -> int:
        """In tokens."""
        return self._config.chunk_size

    def new_cache(self, cache_salt: str | None = None) -> TieredCache:
        """An empty cache for one sequence. KV is shared between sequences of equal salts. Raises
        ``ValueError`` after :meth:`close`."""
        if not self._hooks:
            raise ValueError("these KVTiers are closed: create new ones")
        cache = TieredCache(self._model.config, self, cache_salt)
        if self._config.require_cache_salt and not cache_salt:
            cache.bypasses = True
        return cache

    def finish_stores(self) -> None:
        """Wait until computed chunks are in the CPU tier; after ``load_deadline_seconds`` the rest
        is dropped. Writes to Redis go on."""
        if self._is_alive:
            with self._lock:
                self._tiers.finish_stores()

    def close(self) -> None:
        """Write what is queued for Redis, within 5 s, remove the model's hooks, and release memory
        and threads. Existing caches become plain ones. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        if self._is_alive:
            with self._lock:
                self._tiers.close()
                self._hooks = ()  # last: an interrupted close is called again

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_alive(self) -> bool:
        """False once closed, and in forked processes, which lack the threads and connections."""
        return bool(self._hooks) and os.getpid() == self._process

    # -- hooks ---------------------------------------------------------------------------------

    def _before(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        arguments = by_name(self._names, args, kwargs)
        cache = arguments.get("past_key_values")
        if not isinstance(cache, TieredCache) or cache.owner is not self:
            return None
        cache.running = None  # left by a failed pass
        if cache.bypasses:
            return None
        if not self._is_alive:
            self._bypass(cache, "it runs in a forked process, or KVTiers are closed")
            return None
        with self._lock:
            call = self._understood(cache, arguments)
            if isinstance(call, str):
                self._bypass(cache, call)
                return None
            num_restored = self._restore(cache, call)
            cache.running = replace(call, token_ids=call.token_ids[num_restored:])
            self._tiers.forward_begins(len(cache.running.token_ids), len(cache.token_ids))
        return ((), without_first(arguments, num_restored)) if num_restored else None

    def _after(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        cache = by_name(self._names, args, kwargs).get("past_key_values")
        if not isinstance(cache, TieredCache) or cache.owner is not self or cache.running is None:
            return
        call, cache.running = cache.running, None
        with self._lock:
            if not self._is_alive:
                return
            self._tiers.forward_ended()
            cache.computed(call.token_ids)
            if cache.get_seq_length() != len(cache.token_ids):
                self._bypass(cache, _WRITTEN)
            elif altered := find_alteration(self._model, self._device):  # by another thread
                self._bypass(cache, altered)
            else:
                self._keep(cache)

    def _understood(self, cache: TieredCache, arguments: Mapping[str, Any]) -> ForwardCall | str:
        """The tokens that the pass computes, or why its KV or the cached KV may not match the
        keys."""
        num_cached = len(cache.token_ids)
        if not cache.is_unmodified or cache.get_seq_length() != num_cached:
            return _WRITTEN
        call = ForwardCall.of(arguments, num_cached)
        if isinstance(call, str):
            return call
        if altered := find_alteration(self._model, self._device):
            return altered
        may_restore = num_cached == 0 or self._num_wanted(call, num_cached) > num_cached
        if may_restore and not self._is_same_model(cache):
            return _CHANGED
        assert cache.keys is not None
        cache.keys.shorten(num_cached)  # a failed pass may have left more
        return call

    def _num_wanted(self, call: ForwardCall, num_cached: int) -> int:
        """Tokens of the chunks that need not be computed if they are stored."""
        size = self._config.chunk_size
        return (num_cached + len(call.token_ids) - call.num_read) // size * size

    def _is_same_model(self, cache: TieredCache) -> bool:
        """Whether the cached KV and the current model belong together. Gives an empty cache its
        keys. Called before a restore or store."""
        self._identity.refresh()
        if not cache.token_ids:
            cache.keys = self._identity.keys(cache.cache_salt)
            cache.version = self._identity.version
        return cache.version == self._identity.version and self._model.device == self._device

    def _bypass(self, cache: TieredCache, reason: str) -> None:
        cache.bypasses = True
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("A sequence is neither loaded nor stored from now on: %s", reason)

    # -- chunks --------------------------------------------------------------------------------

    def _restore(self, cache: TieredCache, call: ForwardCall) -> int:
        """Put in the longest stored prefix. Returns how many of the call's tokens it covers."""
        assert cache.keys is not None
        size, num_cached = self._config.chunk_size, len(cache.token_ids)
        num_wanted = self._num_wanted(call, num_cached)
        if num_wanted <= num_cached:
            return 0
        tokens = [*cache.token_ids, *call.token_ids]
        cache.keys.extend(tokens)
        wanted = cache.keys.keys[: num_wanted // size]
        plan = self._tiers.plan(wanted, num_cached, len(tokens), cache.cache_salt)
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
            cache.num_kept = end // size
        return number

    def _load(self, plan: LoadPlan, restored: list[torch.Tensor]) -> int:
        size = self._config.chunk_size
        part = self._form.part([as_blocks(each, size) for each in restored], size)
        try:
            return self._tiers.load(plan, part, range(plan.first, plan.stop))
        except StuckCopyError:
            logger.exception("A load got stuck: its KV is computed instead")
            return 0  # the copy may still write, but only into memory that nothing else uses

    def _keep(self, cache: TieredCache) -> None:
        """Store completed chunks that are not stored yet."""
        assert cache.keys is not None
        size = self._config.chunk_size
        known = len(cache.token_ids)
        end = self._tiers.num_storable(known, cache.num_prompt_tokens)
        first = cache.num_kept
        if end <= first:
            return
        is_of_form = self._form.is_of(cache.tensors(), known, self._device)
        if not is_of_form or not self._is_same_model(cache):
            self._bypass(cache, _CHANGED if is_of_form else _WRITTEN)
            return
        cache.keys.extend(cache.token_ids)
        blocks = [as_blocks(each.detach(), size) for each in cache.tensors()]
        part = self._form.part(blocks, size)
        keys = cache.keys.keys[first:end]
        self._tiers.store(keys, first, part, range(first, end), cache.cache_salt)
        cache.num_kept = end
