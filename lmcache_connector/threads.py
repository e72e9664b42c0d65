"""How every thread of the product is started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


def start_thread(
    name: str, work: Callable[[*Arguments], object], *arguments: *Arguments
) -> threading.Thread:
    """Run ``work(*arguments)`` on a thread that holds up nobody's exit. ``name`` says whose it is.

    Raises ``RuntimeError`` if the system has no thread to spare.
    """
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
