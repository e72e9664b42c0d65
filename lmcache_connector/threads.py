"""How every thread of the product is started."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


def start_thread(
    name: str, work: Callable[[*Arguments], object], *arguments: *Arguments
) -> threading.Thread:
    """Run ``work(*arguments)`` on a thread that holds up nobody's exit, and whose torch has no
    threads of its own. ``name`` says whose it is.

    Raises ``RuntimeError`` if the system has no thread to spare.
    """

    @computing_alone()
    def run() -> None:
        work(*arguments)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


@contextmanager
def computing_alone() -> Iterator[None]:
    """What the calling thread computes in here gives it no OpenMP threads.

    Otherwise torch gives each thread that computes a team of them, for good. Where a process has
    more of those than cores, GNU's OpenMP lets all of them sleep between two loops instead of spin,
    the engine's own too: its decode steps took 1.4 to 1.8 times as long.
    """
    torch, openmp = sys.modules.get("torch"), ctypes.CDLL(None)
    if torch is None or not hasattr(openmp, "omp_set_num_threads"):
        yield
        return
    torch.get_num_threads()  # sets the number of the process, once per thread
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)
