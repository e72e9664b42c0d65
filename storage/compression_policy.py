"""Which values are written compressed: with ``auto``, where that makes loads quicker.

The rule, `pays`. A reader receives a value, then decompresses it, so a byte of payload takes
``1 / link`` seconds as it is and ``ratio / link + 1 / decompress`` compressed. Compression begins
when that is less by a tenth, and ends when it is more. Where the server's memory is full, room for
half as many chunks again is worth loads that are a fifth slower. It ends, too, where cores are what
lacks: a thread that compresses must get most of a core, and readers that have to share half of the
cores decompress in turn.

Everything is measured as it goes: the link by what each reader receives, the rest by compressing
one value in sixteen even where that does not pay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_connector.storage.chunk_codec import Buffer, Codec
from lmcache_connector.storage.compression import compress, decompress

_SAMPLE_EVERY = 16
_GAIN_TO_BEGIN = 0.9
_COST_OF_ROOM = 1.2
_LEAST_CORE_SHARE = 0.6
# What the last measurement counts.
_NEWEST = 0.5
_NEWEST_RECEIVED = 0.1


@dataclass(frozen=True, slots=True)
class Measured:
    """Speeds are bytes of payload a second: ``link`` of one reader while the others read too,
    ``decompress`` of one thread. ``ratio``: stored bytes by payload bytes. ``core_share``: of a
    core, what a compressing thread got."""

    link: float
    decompress: float
    ratio: float
    core_share: float


def pays(measured: Measured, *, is_on: bool, memory_is_full: bool = False) -> bool:
    """The rule above."""
    plain = 1 / measured.link
    compressed = measured.ratio / measured.link + 1 / measured.decompress
    limit = (1.0 if is_on else _GAIN_TO_BEGIN) * (_COST_OF_ROOM if memory_is_full else 1.0)
    shrinks = measured.ratio <= _GAIN_TO_BEGIN
    return shrinks and measured.core_share >= _LEAST_CORE_SHARE and compressed <= limit * plain


class CompressionPolicy:
    """Of one tier. Thread-safe. ``clock`` returns seconds, ``cpu_clock`` those that the calling
    thread has had a core for."""

    def __init__(
        self,
        codec: Codec,
        num_readers: int,
        num_cores: int,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._codec = codec
        self._readers_per_core = num_readers / max(1, min(num_readers, num_cores // 2))
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._lock = threading.Lock()
        self._link: float | None = None
        self._sampled: Measured | None = None
        self._num_values = 0
        self._is_on = False
        self.memory_is_full = False
        """The server's, as the tier has found it when it connected."""

    def received(self, num_bytes: int, seconds: float) -> None:
        """A reader has received these bytes of replies, and waited for nothing else meanwhile."""
        if seconds > 0.0:
            with self._lock:
                old = self._link
                share = 1.0 if old is None else _NEWEST_RECEIVED
                # Averages seconds a byte, as the rule adds them.
                self._link = 1 / (share * seconds / num_bytes + (1 - share) / (old or 1.0))

    def compress(self, payload: Buffer, dtype: str) -> bytes | None:
        """What to store instead of ``payload``; None if that is stored."""
        if self._codec == "none":
            return None
        if self._codec == "blosc2":
            return compress(payload, dtype)
        with self._lock:
            is_sample = self._num_values % _SAMPLE_EVERY == 0
            self._num_values += 1
            is_on = self._is_on
        if not is_sample:
            return compress(payload, dtype) if is_on else None
        chunk = self._sample(payload, dtype)
        return chunk if self._is_on else None

    def _sample(self, payload: Buffer, dtype: str) -> bytes | None:
        """Compress, measure, and decide anew."""
        begun, cpu_begun = self._clock(), self._cpu_clock()
        chunk = compress(payload, dtype)
        seconds, cpu_seconds = self._clock() - begun, self._cpu_clock() - cpu_begun
        ratio, unpack_seconds = 1.0, seconds
        if chunk is not None:
            ratio, begun = len(chunk) / len(payload), self._clock()
            decompress(memoryview(chunk), memoryview(bytearray(len(payload))), dtype)
            unpack_seconds = self._clock() - begun
        self._take(
            Measured(
                link=0.0,
                decompress=len(payload) / max(unpack_seconds * self._readers_per_core, 1e-9),
                ratio=ratio,
                core_share=min(1.0, cpu_seconds / max(seconds, 1e-9)),
            )
        )
        return chunk

    def _take(self, new: Measured) -> None:
        with self._lock:
            old = self._sampled or new
            self._sampled = Measured(
                link=self._link or 0.0,
                decompress=_NEWEST * new.decompress + (1 - _NEWEST) * old.decompress,
                ratio=_NEWEST * new.ratio + (1 - _NEWEST) * old.ratio,
                core_share=_NEWEST * new.core_share + (1 - _NEWEST) * old.core_share,
            )
            self._is_on = self._link is not None and pays(
                self._sampled, is_on=self._is_on, memory_is_full=self.memory_is_full
            )
