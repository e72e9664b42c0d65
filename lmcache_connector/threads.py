"""How every thread of the product is started."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


def start_thread(
    name: str, work: Callable[[*Arguments], object], *arguments: *Arguments
) -> threading.Thread:
    """Run ``work(*arguments)`` on a thread that holds up nobody's exit, and whose torch has no
    threads of its own. ``name`` says whose it is.

    Raises ``RuntimeError`` if the system has no thread to spare.
    """

    def run() -> None:
        _compute_alone()
        work(*arguments)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _compute_alone() -> None:
    """Otherwise torch gives each thread that computes a team of OpenMP threads, for good. Where a
    process has more of those than cores, GNU's OpenMP lets all of them sleep between two loops
    instead of spin, the engine's own too: its decode steps took 1.4 to 1.8 times as long.
    """
    if (torch := sys.modules.get("torch")) is None:
        return
    torch.get_num_threads()  # sets the number of the process, once per thread
    if (limit := getattr(ctypes.CDLL(None), "omp_set_num_threads", None)) is not None:
        limit(1)
