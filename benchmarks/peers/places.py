"""Targets of plain transfers: a new place each time, as with blocks of a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

_CACHES_BYTES = 128 << 20
"""More than a processor's caches hold."""


def num_places(num_bytes: int) -> int:
    """Enough that a place has left the processor's caches when its turn comes again."""
    return max(2, -(-_CACHES_BYTES // num_bytes))


def places(num_bytes: int) -> Iterator[int]:
    """An endless series of offsets for ``num_bytes``, in memory of ``num_places``."""
    return cycle(number * num_bytes for number in range(num_places(num_bytes)))
