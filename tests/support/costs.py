"""What a call costs, counted: no clock of a busy machine is asked.

After a forward pass nothing of the product lies in the processor's caches: what a call costs there
is the same whatever it does, about a microsecond. The number of calls is the same on every machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import lmcache_connector

_PRODUCT = str(Path(lmcache_connector.__file__).parent)


def lines_run(work: Callable[[], object], *modules: ModuleType) -> int:
    """Lines of ``modules`` that run while ``work`` does. A walk through n entries, by a loop, a
    comprehension or a key function, runs n lines or more; one inside C code is not seen."""
    files = {module.__file__ for module in modules}
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


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
