"""What no engine does to its CPU tier by itself."""

from __future__ import annotations

from typing import Any


def forget_memory(worker: Any) -> None:
    """Empty the CPU tier of a ``WorkerAdapter`` at once, between two steps with no plan under way.
    No load is planned inside a step before the scheduler side has heard of it."""
    worker._weights.changes.add()
    worker._engine.forget_all()
