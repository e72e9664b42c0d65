"""Which blocks of a paged cache hold KV that this connector saw come about, and of which tokens.

A caller's word that the first tokens of a sequence are in its blocks is an intention: it may have
reused the block, or computed on top of what is not there. So a chunk is stored only if all of it,
and all before it, was restored by ``recv`` or went through ``send`` with these blocks since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Lineage = tuple[bytes, tuple[int, ...]]
"""The key that the block's chunk is chained to, and the chunk's tokens up to the block's last one
that is there."""


class BlockWitness:
    """``block_size`` divides ``chunk_size``, both in tokens. O(1) per block and step."""

    def __init__(self, block_size: int, chunk_size: int) -> None:
        self._block_size = block_size
        self._chunk_size = chunk_size
        self._lineages: dict[int, Lineage] = {}

    def __len__(self) -> int:
        """Blocks that something is known of."""
        return len(self._lineages)

    def begin(self, parents: Sequence[bytes], tokens: Sequence[int], blocks: Sequence[int]) -> bool:
        """A step writes after ``tokens`` into ``blocks``: whether these begin with the KV of
        exactly these tokens. What came after is forgotten. ``parents[c]``: what the key of chunk c
        is chained to."""
        wanted = list(self._of(parents, tokens, 0))
        is_known = all(self._holds(blocks[index], lineage) for index, lineage in wanted)
        first_written = len(tokens) // self._block_size
        for block in blocks[first_written:]:
            self._lineages.pop(block, None)
        if is_known and len(tokens) % self._block_size:
            index, lineage = wanted[-1]
            self._lineages[blocks[index]] = lineage
        return is_known

    def learn(
        self, parents: Sequence[bytes], tokens: Sequence[int], blocks: Sequence[int], start: int
    ) -> None:
        """The KV of ``tokens`` from number ``start`` on has come into ``blocks``, on top of what
        :meth:`begin` has found there."""
        for index, lineage in self._of(parents, tokens, start):
            self._lineages[blocks[index]] = lineage

    def forget(self, blocks: Iterable[int]) -> None:
        """Somebody else has written to these."""
        for block in blocks:
            self._lineages.pop(block, None)

    def forget_all(self) -> None:
        """Nothing that was computed until now counts any more."""
        self._lineages.clear()

    def _holds(self, block: int, lineage: Lineage) -> bool:
        """Whether the block holds those tokens, and maybe more after them."""
        parent, tokens = self._lineages.get(block, (b"", ()))
        return parent == lineage[0] and tokens[: len(lineage[1])] == lineage[1]

    def _of(
        self, parents: Sequence[bytes], tokens: Sequence[int], start: int
    ) -> Iterator[tuple[int, Lineage]]:
        """Index and lineage of the blocks with tokens from ``start`` on."""
        size = self._block_size
        for index in range(start // size, -(-len(tokens) // size)):
            chunk = index * size // self._chunk_size
            inside = tuple(tokens[chunk * self._chunk_size : (index + 1) * size])
            yield index, (parents[chunk], inside)
