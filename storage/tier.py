"""The interface of a tier of chunks.

A tier holds whole chunks by their keys, and returns their bytes verified or not at all.
`tests/storage/redis/test_tier.py` tests writable tiers against this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_connector.storage.geometry import PartGeometries

OnDone = Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class ReadResult:
    """``hits[i]``: chunk i is there, every byte verified. ``seconds``: how long the read took.
    ``cut_off``: chunks are missing because a server was too slow or a connection broke."""

    hits: list[bool]
    seconds: float
    cut_off: bool


class ReadableTier(Protocol):
    """One rank's way to chunks. Thread-safe. A failure is a miss, counted by its cause."""

    @property
    def geometries(self) -> PartGeometries:
        """Sizes and places of all that a chunk holds."""
        ...

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        cancelled: Callable[[], bool] = ...,
    ) -> ReadResult:
        """Read consecutive chunks of one prompt. Blocks; touches no buffer once it has returned.

        ``keys``: ``CHUNK_KEY_BYTES`` bytes each. ``buffers``: for each key the ``chunk_bytes`` of
        its geometry, writable. The buffer of a miss holds rubbish afterwards.
        ``deadline``: a reading of the tier's clock, in seconds, past which this does not wait;
        nor does it once ``cancelled()``.

        After the first miss the rest is not worth reading, and may be hits or misses. Raises
        ``ValueError`` for keys or buffers of the wrong size.
        """
        ...

    def close(self, seconds: float) -> bool:
        """Waits so long at most. Every later read is a miss. False if a thread was left behind."""
        ...


class WritableTier(ReadableTier, Protocol):
    """A tier that this engine also writes."""

    def put(self, key: bytes, buffer: memoryview, on_done: OnDone, order: int = 0) -> bool:
        """Write a chunk in the background. Never blocks. False if there was no room for it.

        ``buffer``: as many bytes as the key's geometry says, not to change before ``on_done``. That
        is called exactly once, from any thread, maybe before this returns: with True if all values
        that this rank writes are known to be in the tier. ``order``: the chunk's index in its
        prompt; when the queue is full, the deepest chunks are given up first. Never overwrites a
        valid value. Raises ``ValueError`` for a key or buffer of the wrong size.
        """
        ...
