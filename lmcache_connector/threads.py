"""How every thread of the product is started, and how long a step waits for them."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

Arguments = TypeVarTuple("Arguments")
AnswerT = TypeVar("AnswerT")

_IDLE_WAIT_SECONDS = 0.005
"""While nothing runs an idle step would take no less."""


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


class StepWait:
    """What one engine step may wait for other threads, for all requests together: ``seconds``, or
    more while ``is_idle``, when no request runs."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_idle = True
        self._seconds = seconds
        self._clock = clock
        self._spent = 0.0

    def next_step(self) -> None:
        self._spent = 0.0

    def on(self, wait: Callable[[float], AnswerT]) -> AnswerT:
        """``wait(seconds)``, with as many seconds as are left."""
        most = self._seconds
        if self.is_idle and most:
            most = max(most, _IDLE_WAIT_SECONDS)
        started = self._clock()
        answer = wait(max(0.0, most - self._spent))
        self._spent += self._clock() - started
        return answer

    def end(self) -> None:
        """One has waited in vain: the others of this step wait no more."""
        self._spent = float("inf")
