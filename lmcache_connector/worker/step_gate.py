"""Keeps copies of blocks that vLLM may have overwritten before it said so."""

from __future__ import annotations

import threading


class StepGate:
    """Open while a step is under way, from when its plan has said which blocks it overwrites.

    Blocks change only in a step whose plan names them. A copy that ends while the gate is open has
    read nothing of the kind. One that ends between two steps may have: where reused blocks are
    zeroed, vLLM's model runner V2 does that before it hands over the plan. So it waits for the
    plan, which cancels it if it names its blocks.
    """

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._is_shut = False

    def open(self) -> None:
        """The plan's cancellations are made."""
        if not self._open.is_set():
            self._open.set()

    def close(self) -> None:
        """The step has ended."""
        if not self._is_shut:
            self._open.clear()

    def shut(self) -> None:
        """There will be no further plan: what has not passed is lost."""
        self._is_shut = True
        self._open.set()

    def passes(self, cancelled: threading.Event) -> bool:
        """Whether what was copied until now may be kept. Waits for the next step at most."""
        was_open = self._open.is_set()
        self._open.wait()
        return not cancelled.is_set() and (was_open or not self._is_shut)
