"""A paged KV cache that shows whose bytes it holds.

The KV of a position is made from one integer, its *cell*: a digest of everything before it and of
its own token, as in a real model. Each layer and head has bytes of its own, so nothing can be
swapped unnoticed. The words of a token in one layer and head differ little: they compress well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from tests.simulation.kernel import SimulationFailure

_MASK = (1 << 63) - 1


def next_cell(before: int, token: int) -> int:
    return hash((before, token)) & _MASK


def cells_of(tokens: Sequence[int]) -> list[int]:
    """Of each position of a request, by the first version of the weights."""
    cells: list[int] = []
    for token in tokens:
        cells.append(next_cell(cells[-1] if cells else 0, token))
    return cells


@lru_cache(maxsize=1024)
def _salt(layer: int, head: int, width: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((layer, head)).integers(1, _MASK) ^ np.arange(width // 8)


def payload(cells: Sequence[int], layers: range, head: int, width: int) -> bytes:
    """What a stored value must hold: [layers][tokens][content] of one KV head."""
    salts = np.stack([_salt(layer, head, width) for layer in layers])
    values: npt.NDArray[np.int64] = np.asarray(cells, np.int64)[None, :, None] ^ salts[:, None]
    return values.tobytes()


class KVMemory:
    """The blocks of one rank. ``heads``: the KV heads it holds, of the whole model's."""

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, heads: Sequence[int], width: int
    ) -> None:
        shape = (num_layers, num_blocks, len(heads), block_size, width)
        memory = np.zeros(shape, np.uint8)
        self._tensor = torch.from_numpy(memory)
        self._words: npt.NDArray[np.int64] = memory.view(np.int64)
        self._block_size = block_size
        # [layers, heads, words]
        self._salts = np.stack(
            [[_salt(layer, head, width) for head in heads] for layer in range(num_layers)]
        )

    def caches(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """As vLLM registers them: [blocks, heads, tokens, content] of each layer."""
        return {
            f"model.layers.{i}.self_attn.attn": layer.view(dtype)
            for i, layer in enumerate(self._tensor)
        }

    def write(self, blocks: Sequence[int], start: int, cells: Sequence[int]) -> None:
        """Positions from ``start`` on of the request that has ``blocks``."""
        where, at = self._places(blocks, start, len(cells))
        self._words[:, where, :, at] = self._content(cells)

    def check(self, blocks: Sequence[int], start: int, cells: Sequence[int], who: str) -> None:
        """Fail unless these positions hold what their cells say."""
        if not cells:
            return
        where, at = self._places(blocks, start, len(cells))
        right = (self._words[:, where, :, at] == self._content(cells)).all(axis=(1, 2, 3))
        if not right.all():
            position = start + int(np.argmin(right))
            raise SimulationFailure(f"WRONG BYTES: {who} computes on wrong KV at {position}")

    def _places(
        self, blocks: Sequence[int], start: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        block, at = np.divmod(np.arange(start, start + count), self._block_size)
        return np.asarray(blocks, np.int64)[block], at

    def _content(self, cells: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.asarray(cells, np.int64)[:, None, None, None] ^ self._salts
