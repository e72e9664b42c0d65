"""Which chunks in memory new requests have in their prompts.

A request that vLLM's own prefix cache serves loads nothing, nor stores anything new. The workers
hear of it all the same: its prompt is in use, and its hints are for chunks stored before it too.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_connector.kv_parts.part import Part, Rule, keys_of_part
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.plans import Claim, PrefixUse


class PrefixUses:
    """Collects uses for the next plan. ``parts``: the model's. ``new``: since the last one."""

    def __init__(self, parts: Sequence[Part], index: ChunkIndex) -> None:
        self._parts = parts
        self._index = index
        self.new: list[PrefixUse] = []

    def add(self, chunk_keys: Sequence[bytes], claim: Claim) -> None:
        """A new request has this prompt. O(its chunks)."""
        keys: list[bytes] = []
        for number, part in enumerate(self._parts):
            own = keys_of_part(chunk_keys, number, len(self._parts))
            are_held = self._index.has_each(own)
            if part.rule is not Rule.PREFIX:
                keys += [key for key, is_held in zip(own, are_held, strict=True) if is_held]
                continue
            num_held = are_held.index(False) if False in are_held else len(own)
            keys += own[max(0, num_held - 1) : num_held]  # the last: it builds on all the others
        if keys:
            self.new.append(PrefixUse(claim, tuple(keys)))

    def take(self) -> tuple[PrefixUse, ...]:
        """Since the last call."""
        new, self.new = tuple(self.new), []
        return new
