"""Where a plain transfer writes: elsewhere each time, as a paged cache's blocks are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

_CACHES_BYTES = 128 << 20
"""More than a processor's caches hold."""


def num_places(num_bytes: int) -> int:
    """So many that none is in the processor's caches when its turn comes again."""
    return max(2, -(-_CACHES_BYTES // num_bytes))


def places(num_bytes: int) -> Iterator[int]:
    """Offsets for transfers of ``num_bytes``, for ever, in memory of so many places."""
    return cycle(number * num_bytes for number in range(num_places(num_bytes)))
