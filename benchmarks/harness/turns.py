"""Engines that take turns: the others are stopped, since some never sleep.

vLLM's ``NixlConnector`` has a thread that polls all the time. On two cores, another engine beside
it would be measured with half of the machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


def stop(pids: Sequence[int]) -> None:
    """Stop these processes; their child processes go on."""
    _signal(pids, signal.SIGSTOP)


def go_on(pids: Sequence[int]) -> None:
    """Continue these processes; running ones are not affected."""
    _signal(pids, signal.SIGCONT)


@contextmanager
def turn_of(pids: Sequence[int]) -> Iterator[None]:
    """These processes run inside the context."""
    go_on(pids)
    try:
        yield
    finally:
        stop(pids)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
