"""Counts the Python frames that the product adds to what calls it.

After a forward pass nothing of it lies in the processor's caches: what a call costs there is the
same whatever it does, about a microsecond. The number of calls is also the same on every machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lmcache_connector

_PRODUCT = str(Path(lmcache_connector.__file__).parent)


def product_frames(work: Callable[[], object]) -> Counter[str]:
    """Frames of the product, and of whatever it called, that began while ``work()`` ran on this
    thread, by qualified name."""
    begun: Counter[str] = Counter()

    def see(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and _is_within_product(frame):
            begun[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
    return begun


def _is_within_product(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PRODUCT):
            return True
        frame = frame.f_back
    return False
