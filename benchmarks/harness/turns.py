"""Engines that take turns: whoever has none is stopped, for some never sleep.

vLLM's ``NixlConnector`` keeps a thread that looks for news all the time. Beside it on two cores,
anything else would be measured without half of the machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


def stop(pids: Sequence[int]) -> None:
    """These processes stand still. What they have started goes on."""
    _signal(pids, signal.SIGSTOP)


def go_on(pids: Sequence[int]) -> None:
    """They go on; those that do need no telling."""
    _signal(pids, signal.SIGCONT)


@contextmanager
def turn_of(pids: Sequence[int]) -> Iterator[None]:
    """They go on until the end of it."""
    go_on(pids)
    try:
        yield
    finally:
        stop(pids)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
