"""The connector for engines that are stepped by hand: three calls around a forward pass.

::

    connector = LMCacheConnector(rank, local_rank, {"cpu_gib": 8, "redis_url": "redis://host"})
    while (model_input := next_step()) is not None:
        hidden, bypass, model_input = connector.recv_kv_caches_and_hidden_states(
            model, model_input, kv_caches)
        if not bypass:
            hidden = model(model_input, kv_caches)
        connector.send_kv_caches_and_hidden_states(model, model_input, kv_caches, hidden)
    connector.close()

``kv_caches`` has one entry per layer, K and V: a tensor ``[2, blocks, block_size, heads,
head_dim]`` or a pair of tensors ``[blocks, block_size, heads, head_dim]``, of any strides with
contiguous heads, the same in every call. All layers keep all tokens: one block table cannot
describe sliding windows or recurrent states. Not thread-safe, and steps must not overlap.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.stepwise.identity import is_split
from lmcache_connector.stepwise.model_input import ModelInput
from lmcache_connector.stepwise.paged import KVCaches, PagedSequences
from lmcache_connector.stepwise.tiers import Counts, read_settings

logger = logging.getLogger(__name__)

_ENGINE = "stepwise"

Agree = Callable[[Sequence[int]], Sequence[int]]


class LMCacheConnector:
    """Stores and restores KV around the forward passes of one rank.

    ``rank`` and ``local_rank``: of this process in its group, and on this host. ``config``: keys of
    ``kv_connector_extra_config``, see docs/settings.md. ``agree``: for ranks that hold parts of one
    model and must restore alike: returns the element-wise minimum of all ranks' arguments (an
    ``all_reduce``). Without it, ranks are replicas and share what they store. ``label``: your name
    for the model's code, to be changed with the code, since nothing else identifies it.

    Raises ``ConfigError`` with all problems of the settings, or ``UnsupportedError`` for an
    unusable LMCache. Memory is allocated by the first ``recv`` or ``send``.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        config: Mapping[str, Any],
        agree: Agree | None = None,
        label: str = "",
    ) -> None:
        self._rank = rank
        self._local_rank = local_rank
        self._config = read_settings(config)
        self._agree = agree
        self._label = label
        self._model: Any = None
        self._paged: PagedSequences | None = None
        self._process = os.getpid()
        self._is_closed = False

    @property
    def counts(self) -> Counts:
        return self._paged.tiers.counts if self._paged is not None else Counts()

    def recv_kv_caches_and_hidden_states(
        self, model_executable: Any, model_input: ModelInput, kv_caches: KVCaches
    ) -> tuple[Any, bool, ModelInput]:
        """Restore the longest stored prefix of every sequence into its blocks, before the forward
        pass. Returns ``(hidden_or_intermediate_states, bypass_model_exec, model_input)``.

        The returned ``model_input`` has shorter ``query_lens``, without restored tokens. Positions
        whose hidden states the caller reads are always computed, by default the last one of each
        sequence, so hidden states are never stored and the first value is always ``None``.
        ``bypass_model_exec`` is true only if the caller reads no hidden states and all KV is there.

        Waits for each load up to its deadline; chunks that have not arrived are computed. The first
        call raises ``UnsupportedError``, ``ConfigError``, ``LayoutError`` or ``SelfTestError`` for
        an unsupported model or caches. Raises ``ValueError`` for another model or caches later,
        inconsistent block tables, and after :meth:`close`, and ``StuckCopyError`` for a stuck load.
        """
        paged = self._bound(model_executable, kv_caches)
        rows = list(model_input.rows())
        paged.check(rows)
        if any(map(paged.may_restore, rows)):
            paged.is_same_model()
        there: Sequence[int] = [paged.restore(row) for row in rows]
        if self._agree is not None:
            there = self._agree(there)
        for row, num_tokens in zip(rows, there, strict=True):
            paged.restored(row, num_tokens)
        left = model_input.with_query_lens(
            [len(row.token_ids) - n for row, n in zip(rows, there, strict=True)]
        )
        if left.num_query_tokens:
            contexts = (n * q for n, q in zip(there, left.query_lens, strict=True))
            mean = sum(contexts) // left.num_query_tokens
            paged.tiers.forward_begins(left.num_query_tokens, mean)
        return None, left.num_query_tokens == 0, left

    def send_kv_caches_and_hidden_states(
        self,
        model_executable: Any,
        model_input: ModelInput,
        kv_caches: KVCaches,
        hidden_or_intermediate_states: Any,
    ) -> None:
        """Store every completed chunk, after the forward pass of the ``model_input`` that ``recv``
        returned. Returns once the blocks are read; drops the rest after ``load_deadline_seconds``.

        ``hidden_or_intermediate_states`` is ignored. Writes to Redis go on afterwards. Nothing is
        stored if the model has changed since ``recv``. Raises ``ValueError`` as ``recv`` does.
        """
        paged = self._bound(model_executable, kv_caches)
        paged.tiers.forward_ended()
        rows = list(model_input.rows())
        paged.check(rows, is_after=True)
        if any(map(paged.completes_chunks, rows)) and not paged.is_same_model():
            return
        try:
            for row in rows:
                paged.keep(row)
        finally:
            paged.tiers.finish_stores()

    def close(self) -> None:
        """Write what is queued for Redis, within 5 s; release memory and threads. Idempotent."""
        self._is_closed = True
        if self._paged is not None and os.getpid() == self._process:
            self._paged.tiers.close()
            self._paged = self._model = None

    def _bound(self, model: Any, kv_caches: KVCaches) -> PagedSequences:
        if self._is_closed:
            raise ValueError("this connector is closed: make another one")
        if os.getpid() != self._process:
            raise ValueError("this connector is another process's: make one after the fork")
        if self._paged is None:
            if self._agree is None and is_split(model):
                raise UnsupportedError(
                    "torch has split the model over ranks, which must load alike: pass agree."
                )
            place = self._rank if self._agree is not None else None
            self._paged = PagedSequences(
                self._config, _ENGINE, place, model, kv_caches, self._label
            )
            self._model = model
            if self._local_rank == 0:
                logger.info("LMCacheConnector: %s", self._paged.tiers)
        elif model is not self._model or not self._paged.is_of(kv_caches):
            raise ValueError("a connector serves one model and its KV caches: make another one")
        return self._paged
