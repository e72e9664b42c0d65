"""Restores and stores chunks of sequences in a paged cache.

The caller may be wrong about a block's tokens: it may have reused the block, or computed on top of
missing KV. So a chunk is stored only if ``recv`` restored or ``send`` saw every token up to its
end, in these blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lmcache_connector.config.tiered import ConnectorConfig, fit_chunk_size
from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.request_keys import RequestKeys
from lmcache_connector.stepwise.form import KVForm
from lmcache_connector.stepwise.identity import ModelIdentity, alteration
from lmcache_connector.stepwise.model_input import Row
from lmcache_connector.stepwise.tiers import Tiers

logger = logging.getLogger(__name__)

KVCaches = Sequence[torch.Tensor | Sequence[torch.Tensor]]
Lineage = tuple[bytes, tuple[int, ...]]
"""Of a block: the parent of its chunk's key, and the chunk's tokens up to the block's last."""


@dataclass(slots=True)
class _HashedSequence:
    """A sequence whose chunks were hashed in an earlier step."""

    tokens: tuple[int, ...]
    cache_salt: str | None
    keys: RequestKeys


class PagedSequences:
    """The sequences in ``kv_caches``, whose form :mod:`.connector` describes. ``place`` and
    ``label``: see :class:`ModelIdentity`. Raises ``UnsupportedError``, ``ConfigError``,
    ``LayoutError`` or ``SelfTestError``.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        engine: str,
        place: int | None,
        model: object,
        kv_caches: KVCaches,
        label: str = "",
    ) -> None:
        blocks = as_layers(kv_caches)
        form = KVForm.of(blocks)
        self._block_size: int = blocks[0].shape[2]
        self._config = config = config.fitted(
            fit_chunk_size(config.wanted_chunk_size, self._block_size), 1
        )
        self._part = form.part(blocks, config.chunk_size)
        self._per_chunk = config.chunk_size // self._block_size
        self._identity = ModelIdentity(model, engine, form, config, place, label)
        self._model, self._device_type = model, blocks[0].device.type
        self._alteration, self._is_altered, self._told = "", False, {""}
        self._lineages: dict[int, Lineage] = {}  # of blocks with known tokens
        self._sequences: dict[int, _HashedSequence] = {}
        self._identity.refresh()
        self.tiers = Tiers(config, self._part, self._identity.root)

    def is_of(self, kv_caches: KVCaches) -> bool:
        """Whether ``kv_caches`` are the tensors of this object."""
        ours = self._part.groups[0].owners
        theirs = as_layers(kv_caches)
        return [each.data_ptr() for each in ours] == [each.data_ptr() for each in theirs]

    def may_restore(self, row: Row) -> bool:
        """Whether there is a chunk to look up."""
        size = self._config.chunk_size
        return row.wanted_from // size * size > row.context_len

    def completes_chunks(self, row: Row) -> bool:
        return row.context_len // self._config.chunk_size < self._num_storable(row)

    def is_same_model(self) -> bool:
        """Whether the model is unchanged; forgets all blocks if not. Call it before every restore
        and store."""
        is_changed = self._identity.refresh()
        if is_changed:
            self.forget_all()
        return not is_changed

    def forget_all(self) -> None:
        """Treat the content of all blocks as unknown."""
        self._lineages.clear()
        self._sequences.clear()

    def forget(self, blocks: Sequence[int]) -> None:
        """Treat the content of these blocks as unknown."""
        for block in blocks:
            self._lineages.pop(block, None)

    def check(self, rows: Sequence[Row], *, is_after: bool = False) -> None:
        """Called before a pass and after it. Raises ``ValueError`` for inconsistent block tables:
        chunks would be stored with the KV of other tokens. Nothing is restored before a pass that
        something alters, and nothing is stored if something alters it before or after."""
        before, self._alteration = self._alteration, alteration(self._model, self._device_type)
        self._is_altered = bool(self._alteration or (is_after and before))
        if self._alteration not in self._told:
            self._told.add(self._alteration)
            logger.warning("Sequences are neither loaded nor stored for now: %s", self._alteration)
        for row in rows:
            self._check_blocks(row)
        written = {
            block: row
            for row in rows
            for block in row.blocks[row.context_len // self._block_size : self._num_blocks(row)]
        }
        if len(rows) < 2:
            return
        for row in rows:
            for block in written.keys() & set(row.blocks[: self._num_blocks(row)]):
                self._check_shared(block, row, written[block])

    def restore(self, row: Row) -> int:
        """Load stored chunks of a sequence that will be computed from ``row.context_len`` on.
        Returns the number of its tokens that have KV afterwards."""
        keys, size = self._keys(row), self._config.chunk_size
        if not self._begin(row, keys):
            return row.context_len
        if self._bypasses(row) or not self.may_restore(row):
            return row.context_len
        wanted = keys.keys[: row.wanted_from // size]
        plan = self.tiers.plan(wanted, row.context_len, len(row.token_ids), row.cache_salt)
        if plan is None:
            return row.context_len
        skipped = row.context_len % size // self._block_size
        blocks = row.blocks[plan.first * self._per_chunk + skipped : plan.stop * self._per_chunk]
        arrived = self.tiers.load(plan, self._part, blocks, skipped)
        return max(row.context_len, (plan.first + arrived) * size if arrived else 0)

    def restored(self, row: Row, num_tokens: int) -> None:
        """The sequence now has KV of ``num_tokens``; before, it had KV of ``row.context_len``."""
        if num_tokens > row.context_len:
            found = self._lineages_of(row, self._keys(row), row.context_len, num_tokens)
            self._lineages.update(found)

    def keep(self, row: Row) -> None:
        """Store the chunks that a forward pass from ``row.context_len`` on has completed."""
        keys, size = self._keys(row), self._config.chunk_size
        if not self._begin(row, keys):
            return
        end = len(row.token_ids)
        self._lineages.update(self._lineages_of(row, keys, row.context_len, end))
        if self.completes_chunks(row) and not self._bypasses(row):
            first, end = row.context_len // size, self._num_storable(row)
            blocks = row.blocks[first * self._per_chunk : end * self._per_chunk]
            self.tiers.store(keys.keys[first:end], first, self._part, blocks, row.cache_salt)

    def _begin(self, row: Row, keys: RequestKeys) -> bool:
        """Whether the row's blocks hold the KV of its context, and nothing alters the pass. Forgets
        the content of the blocks behind the context, to which the step writes. Compares at most a
        chunk per block."""
        wanted = list(self._lineages_of(row, keys, 0, row.context_len))
        is_known = all(self._holds(block, lineage) for block, lineage in wanted)
        self.forget(row.blocks[row.context_len // self._block_size :])
        if is_known and row.context_len % self._block_size:
            self._lineages.update(wanted[-1:])
        return is_known and not self._is_altered

    def _holds(self, block: int, lineage: Lineage) -> bool:
        """Whether the block holds the tokens of ``lineage``, maybe followed by others."""
        parent, tokens = self._lineages.get(block, (b"", ()))
        return parent == lineage[0] and tokens[: len(lineage[1])] == lineage[1]

    def _lineages_of(
        self, row: Row, keys: RequestKeys, start: int, end: int
    ) -> Iterator[tuple[int, Lineage]]:
        """Blocks of the row's tokens from ``start`` to ``end``, each with its lineage then."""
        size, chunk_size = self._block_size, self._config.chunk_size
        for index in range(start // size, -(-end // size)):
            chunk = index * size // chunk_size
            inside = row.token_ids[chunk * chunk_size : min(end, (index + 1) * size)]
            yield row.blocks[index], (keys.parent(chunk), inside)

    def _num_storable(self, row: Row) -> int:
        return self.tiers.num_storable(len(row.token_ids), row.num_prompt_tokens)

    def _num_blocks(self, row: Row) -> int:
        return -(-len(row.token_ids) // self._block_size)

    def _check_blocks(self, row: Row) -> None:
        number, there = self._num_blocks(row), self._part.groups[0].num_blocks
        used = row.blocks[:number]
        if len(used) < number:
            raise ValueError(
                f"{len(row.token_ids)} tokens need {number} blocks of {self._block_size}, and "
                f"their block table has {len(used)}"
            )
        if used and not 0 <= min(used) <= max(used) < there:
            raise ValueError(
                f"block table: {min(used)} to {max(used)} is beyond the {there} blocks"
            )
        if len(set(used)) < number:
            raise ValueError("a block table names a block twice, for different tokens")

    def _check_shared(self, block: int, one: Row, other: Row) -> None:
        """Raise ``ValueError`` if ``one`` has a block that ``other`` writes, unless both have the
        same tokens up to its end."""
        index = one.blocks.index(block)
        num_tokens = min((index + 1) * self._block_size, len(one.token_ids), len(other.token_ids))
        is_same_place = other.blocks.index(block) == index
        if not is_same_place or one.token_ids[:num_tokens] != other.token_ids[:num_tokens]:
            raise ValueError(f"two sequences of one step have different tokens in block {block}")

    def _bypasses(self, row: Row) -> bool:
        return self._config.require_cache_salt and not row.cache_salt

    def _keys(self, row: Row) -> RequestKeys:
        """Hashes only tokens that no earlier step of the sequence has hashed."""
        known = self._sequences.get(row.blocks[0]) if row.blocks else None
        if (
            known is None
            or known.cache_salt != row.cache_salt
            or row.token_ids[: len(known.tokens)] != known.tokens
        ):
            known = _HashedSequence((), row.cache_salt, self._identity.keys(row.cache_salt))
        try:
            known.keys.extend(row.token_ids)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids are whole numbers from 0 to 2**32 - 1: {error}") from error
        known.tokens = row.token_ids[: known.keys.num_hashed_tokens]
        if row.blocks:
            self._sequences[row.blocks[0]] = known
        return known.keys


def as_layers(kv_caches: KVCaches) -> list[torch.Tensor]:
    """K and V of each layer in turn, ``[blocks, heads, block_size, head_dim]``. Raises
    ``UnsupportedError`` for other forms."""
    for layer in kv_caches:
        halves = list(layer) if isinstance(layer, torch.Tensor | Sequence) else []
        if len(halves) != 2 or any(_dimensions(half) != 4 for half in halves):
            raise UnsupportedError(
                "kv_caches has one entry per layer, K and V: a tensor [2, blocks, block_size, "
                "heads, head_dim], or a pair of tensors [blocks, block_size, heads, head_dim]."
            )
    return [half.transpose(1, 2) for layer in kv_caches for half in layer]


def _dimensions(half: object) -> int:
    return half.dim() if isinstance(half, torch.Tensor) else 0
