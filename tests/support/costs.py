"""What a call costs, counted: no clock of a busy machine is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


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
