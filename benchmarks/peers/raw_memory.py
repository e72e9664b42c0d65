"""A copy from memory that another process might have written: the limit for mapped memory."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np

from benchmarks.peers.places import num_places, places


class RawMemory:
    """``num_bytes`` of a memfd, mapped read-only, copied from one place after the other."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._places = num_bytes, places(num_bytes)
        size = num_bytes * num_places(num_bytes)
        self._target = np.ones(size, np.uint8)
        descriptor = os.memfd_create("raw-memory")
        try:
            os.ftruncate(descriptor, size)
            with mmap.mmap(descriptor, size) as written:
                np.frombuffer(written, np.uint8).fill(1)
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._source = np.frombuffer(self._map, np.uint8)

    def __enter__(self) -> RawMemory:
        for _ in range(num_places(self._num_bytes)):
            self.gbps()  # unmeasured
        return self

    def __exit__(self, *_: object) -> None:
        del self._source
        self._map.close()

    def gbps(self) -> float:
        """The speed of one copy."""
        place = slice(start := next(self._places), start + self._num_bytes)
        started = time.perf_counter()
        np.copyto(self._target[place], self._source[place])
        return self._num_bytes / (time.perf_counter() - started) / 1e9
