"""Counters of a tier: chunks read, by hit or cause of the miss, and chunks written, by outcome."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum

from lmcache_connector.net.wire import WireFault
from lmcache_connector.storage.chunk_codec import ValueFault
from lmcache_connector.storage.redis.client.resp import ReplyFault


class NotAsked(Enum):
    """Causes of a miss other than a reply, a stored value or a broken connection."""

    UNAVAILABLE = "unavailable"
    # Chunks behind a miss of the same read are of no use.
    AFTER_MISS = "after_miss"
    # The deadline passed before a value of the chunk was requested.
    QUEUED = "queued"
    # A thread of ours failed; the log says how.
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a chunk was not read.

    ``is_behind``: an earlier reply on the same connection failed for ``cause``, so this chunk's
    reply was discarded.
    """

    cause: ReplyFault | ValueFault | WireFault | NotAsked
    is_behind: bool = False

    @property
    def label(self) -> str:
        """The label of the metric, e.g. ``missing``, ``bad_checksum`` or ``after_missing``."""
        return f"after_{self.cause.value}" if self.is_behind else self.cause.value


class WriteEnd(Enum):
    """Outcome of a chunk's write. The values are labels of metrics."""

    WRITTEN = "written"
    ALREADY_THERE = "already_there"
    # The queue was full or closed, or writes to the node pause.
    QUEUE_FULL = "queue_full"
    FAILED = "failed"

    @property
    def is_stored(self) -> bool:
        """Whether all values that this rank writes are known to be in Redis."""
        return self in (WriteEnd.WRITTEN, WriteEnd.ALREADY_THERE)


@dataclass
class TierCounts:
    """Counts since the start. ``misses`` is keyed by `Miss.label`."""

    chunks_hit: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    writes: Counter[WriteEnd] = field(default_factory=Counter)
    bytes_written: int = 0


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = TierCounts()

    def count_chunks(self, num_hits: int, misses: Iterable[Miss]) -> None:
        with self._lock:
            self._counts.chunks_hit += num_hits
            self._counts.misses.update(miss.label for miss in misses)

    def count_write(self, end: WriteEnd) -> None:
        with self._lock:
            self._counts.writes[end] += 1

    def count_bytes_written(self, num_bytes: int) -> None:
        with self._lock:
            self._counts.bytes_written += num_bytes

    def snapshot(self) -> TierCounts:
        with self._lock:
            return deepcopy(self._counts)
