"""Counts the calls that may change a worker's weights; the scheduler side reads the count
without a message.

A plan is made before the worker's next report, and must not miss such a call: if the count differs
from the one in the last report, the plan must not rely on that report. Calls that change weights go
through the scheduler's process in step order, so a plan made after such a call sees its count.

The counter lies in memory that both processes map, on one Linux host. On another host the same path
may lead to other memory, so counts start with a random number.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from pathlib import Path

logger = logging.getLogger(__name__)

_NAME, _BYTES = "lmcache_connector_changes", 8


class ChangeCount:
    """``place``: path by which other processes of this user open the counter; empty if none can."""

    def __init__(self) -> None:
        self._number, self.place = memoryview(bytearray(_BYTES)).cast("Q"), ""
        try:
            self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, _BYTES)
            self._number = memoryview(mmap.mmap(self._descriptor, _BYTES)).cast("Q")
        except (AttributeError, OSError) as error:  # not Linux, or not permitted
            logger.info("lmcache-connector: no hit is loaded inside a step: %s", error)
            return
        self._number[0] = secrets.randbits(62)
        self.place = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def number(self) -> int:
        return self._number[0]

    def add(self) -> None:
        """Call this before each call that may change weights, and again after it."""
        self._number[0] += 1

    def close(self) -> None:
        """Processes that have opened the counter still read its last value."""
        if self.place:
            self.place = ""
            os.close(self._descriptor)


class ReadCount:
    """The counter at ``place``. ``is_there``: whether it can be read."""

    def __init__(self, place: str) -> None:
        self._number = memoryview(bytearray(_BYTES)).cast("Q")
        self.is_there = False
        if not place:
            return
        try:
            if _NAME not in str(Path(place).readlink()):
                raise ValueError("it leads to something else")  # on another host, for instance
            with Path(place).open("rb") as file:
                found = mmap.mmap(file.fileno(), _BYTES, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:  # another host or user
            logger.info("lmcache-connector: no hit is loaded inside a step: %s: %s", place, error)
            return
        self._number, self.is_there = memoryview(found).cast("Q"), True

    @property
    def number(self) -> int:
        return self._number[0]
