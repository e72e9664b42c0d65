"""A number that a worker counts up, and the scheduler side reads without a message.

A plan is made before the worker is heard of again. What must not happen unseen in between, such as
new weights in memory, is counted here first: a plan that was made with another count than the last
report named was made too late to rely on that report. Calls that change weights come through the
scheduler's process, in the order of the steps, so a plan made after such a call sees its count.

The number lies in memory that both processes map. That needs Linux, and one host: elsewhere the
same path may lead to other memory, so counts begin with a number that nothing else holds.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from pathlib import Path

logger = logging.getLogger(__name__)

_BYTES = 8


class ChangeCount:
    """``place``: where another process of this user finds it; empty if none can."""

    def __init__(self) -> None:
        self._number, self.place = memoryview(bytearray(_BYTES)).cast("Q"), ""
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("lmcache_connector_changes", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, _BYTES)
            self._number = memoryview(mmap.mmap(self._descriptor, _BYTES)).cast("Q")
            self._number[0] = secrets.randbits(62)
            self.place = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def number(self) -> int:
        return self._number[0]

    def add(self) -> None:
        """Something changes from here on."""
        self._number[0] += 1

    def close(self) -> None:
        """Whoever has opened it still reads the last number."""
        if self.place:
            self.place = ""
            os.close(self._descriptor)


class ReadCount:
    """The count at ``place``. ``is_there``: whether it can be read."""

    def __init__(self, place: str) -> None:
        self._number = memoryview(bytearray(_BYTES)).cast("Q")
        self.is_there = False
        if not place:
            return
        try:
            with Path(place).open("rb") as file:
                found = mmap.mmap(file.fileno(), _BYTES, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:  # of another host, or another user
            logger.info("lmcache-connector: no hit is loaded inside a step: %s: %s", place, error)
            return
        self._number, self.is_there = memoryview(found).cast("Q"), True

    @property
    def number(self) -> int:
        return self._number[0]
