"""What stands for the KV of a position: one integer, the *cell*.

A digest of what the request computes with, of all tokens up to that position and of the images they
stand for, as in a real model any change before it changes it; with a drafter's head, of the token
after it too.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.doubles.shadow_memory import Cells, cell

VOCABULARY = 61


@dataclass(frozen=True, slots=True)
class Image:
    """Stands at positions ``[start, end)``. vLLM knows it as ``name``, whatever it shows."""

    name: str
    content: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Source:
    """What a request's KV is computed from, beside its tokens."""

    salt: str | None = None
    adapter: str | None = None  # its name
    adapter_version: int = 0
    images: tuple[Image, ...] = ()

    @property
    def is_hidden(self) -> bool:
        """Whether nobody but the request knows it."""
        return self.adapter_version < 0


def cells_of(
    tokens: Sequence[int], source: Source = Source(), weights: int = 0, lookahead: int = 0
) -> Cells:
    """The right ones, of all tokens but the last ``lookahead``."""
    root = f"{source.salt}/{source.adapter}/{source.adapter_version}/{weights}"
    out, last = [], zlib.crc32(root.encode())
    shown = {
        p: zlib.crc32(i.content.encode()) for i in source.images for p in range(i.start, i.end)
    }
    inputs = [shown.get(position, token) for position, token in enumerate(tokens)]
    for one in inputs:
        last = cell(last, one)
        out.append(last)
    return tuple(map(cell, out, inputs[lookahead:])) if lookahead else tuple(out)


def cells_of_part(cells: Cells, part: int) -> Cells:
    """As the layers of that part compute them: none can be taken for those of another part."""
    return cells if part == 0 else tuple(cell(value, -3 - part) for value in cells)


class WrongKV(AssertionError):
    """A block was read or written that is not the request's, or holds something else."""
