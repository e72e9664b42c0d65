"""Threads (the Redis tier starts its own): their start, background work, how long steps wait."""

from __future__ import annotations

import ctypes
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final, Generic, TypeVar, TypeVarTuple

logger = logging.getLogger(__name__)

Arguments = TypeVarTuple("Arguments")
AnswerT = TypeVar("AnswerT")
ValueT = TypeVar("ValueT")

_IDLE_WAIT_SECONDS = 0.005
"""An idle step may wait at least this long; a worker's idle step waits as long for a job to end."""


def start_thread(
    name: str, work: Callable[[*Arguments], object], *arguments: *Arguments
) -> threading.Thread:
    """Run ``work(*arguments)`` on a daemon thread whose torch calls use no further threads.

    Raises ``RuntimeError`` if the system cannot start a thread.
    """

    @computing_alone()
    def run() -> None:
        work(*arguments)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


@contextmanager
def computing_alone() -> Iterator[None]:
    """Compute on the calling thread alone, without OpenMP threads.

    Otherwise torch gives each computing thread a permanent team of them. If a process has more
    OpenMP threads than cores, GNU's OpenMP lets all of them sleep between loops instead of spin,
    the engine's too: decode steps took 1.4 to 1.8 times as long.
    """
    torch, openmp = sys.modules.get("torch"), ctypes.CDLL(None)
    if torch is None or not hasattr(openmp, "omp_set_num_threads"):
        yield
        return
    torch.get_num_threads()  # applies the process's setting, once per thread
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


class Task(Generic[ValueT]):
    """The result of background work. ``value`` is ``None`` until the work is done, and if it
    was cancelled or failed; a failure sets ``error``."""

    def __init__(self) -> None:
        self.value: ValueT | None = None
        self.error: Exception | None = None
        self.is_cancelled = False
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether the task was done within ``seconds``."""
        return self._done.wait(seconds)

    def cancel(self) -> None:
        """Skip the work unless it has begun."""
        self.is_cancelled = True

    def settle(self, value: ValueT | None) -> None:
        self.value = value
        self._done.set()


class Background:
    """Runs slow work in order of submission on ``num_threads`` threads named ``name``, which start
    with the first task."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(
        self, work: Callable[[], ValueT | None], then: Callable[[], None] = lambda: None
    ) -> Task[ValueT]:
        """If ``work()`` raises, the error is logged and the value is ``None``. ``then()`` is called
        on the thread once the task is done. Call from one thread only."""
        while len(self._threads) < self._num_threads:
            self._threads.append(start_thread(self._name, self._run))
        task: Task[ValueT] = Task()

        def run() -> None:
            value: ValueT | None = None
            try:
                if not task.is_cancelled:
                    value = work()
            except Exception as error:  # only this task fails
                task.error = error
                logger.exception("Work in the background failed")
            task.settle(value)
            then()

        self._tasks.put(run)
        return task

    def close(self, seconds: float = 1.0) -> None:
        """Bounded: a thread that hangs, e.g. in a file system, is left behind as a daemon."""
        until = time.monotonic() + seconds
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (run := self._tasks.get()) is not None:
            run()


class Pending(Enum):
    """What was asked for is not known yet: ask again in the next step."""

    PENDING = "pending"


PENDING: Final = Pending.PENDING


class StepWait:
    """The time that one engine step may wait for other threads, for all requests together:
    ``seconds``; if no request runs (``is_idle``), at least 5 ms unless ``seconds`` is 0."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_idle = True
        self._seconds = seconds
        self._clock = clock
        self._spent = 0.0

    def next_step(self) -> None:
        self._spent = 0.0

    def on(self, wait: Callable[[float], AnswerT]) -> AnswerT:
        """Call ``wait(seconds)`` with the remaining seconds."""
        most = self._seconds
        if self.is_idle and most:
            most = max(most, _IDLE_WAIT_SECONDS)
        started = self._clock()
        answer = wait(max(0.0, most - self._spent))
        self._spent += self._clock() - started
        return answer

    def end(self) -> None:
        """A wait was in vain: no further one in this step."""
        self._spent = float("inf")
