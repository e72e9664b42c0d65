"""The interface of a tier of chunks.

A tier holds whole chunks by key, and returns their bytes verified or not at all.
`tests/storage/redis/test_tier.py` tests writable tiers against this interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_connector.storage.geometry import PartGeometries

OnDone = Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class ReadResult:
    """``hits[i]``: chunk i was read and verified. ``seconds``: duration of the read. ``cut_off``:
    chunks are missing because a server was too slow or a connection broke."""

    hits: list[bool]
    seconds: float
    cut_off: bool


class ReadableTier(Protocol):
    """A source of one rank's chunks. Thread-safe. A failure is a miss, counted by cause."""

    @property
    def geometries(self) -> PartGeometries:
        """Sizes of the chunks' parts."""
        ...

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: float,
        cancelled: Callable[[], bool] = ...,
    ) -> ReadResult:
        """Read consecutive chunks of one prompt. Blocks; touches no buffer after it has returned.

        ``keys``: ``CHUNK_KEY_BYTES`` bytes each. ``buffers``: writable, ``chunk_bytes`` of each
        key's geometry; the buffer of a miss then holds garbage. ``deadline``: in seconds of the
        tier's clock; the call returns soon after it, or after ``cancelled()``.

        Chunks behind the first miss are not worth reading, and may be hits or misses. Raises
        ``ValueError`` for keys or buffers of the wrong size.
        """
        ...

    def close(self, seconds: float) -> bool:
        """Waits up to ``seconds``. Later reads are misses. False if a thread is still running."""
        ...


class WritableTier(ReadableTier, Protocol):
    """A tier that this engine also writes."""

    def put(self, key: bytes, buffer: memoryview, on_done: OnDone, order: int = 0) -> bool:
        """Write a chunk in the background. Never blocks. False if there is no room.

        ``buffer``: ``chunk_bytes`` of the key's geometry; must not change before ``on_done``, which
        is called exactly once, from any thread, maybe before `put` returns: with True if all values
        that this rank writes are known to be in the tier. ``order``: the chunk's index in its
        prompt; a full queue drops the deepest chunks first. Never overwrites a valid value. Raises
        ``ValueError`` for a key or buffer of the wrong size.
        """
        ...
