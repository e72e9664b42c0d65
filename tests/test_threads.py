"""A thread of ours must not cost the engine its cores."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from lmcache_connector.threads import start_thread

_SECONDS = 30.0


def start_plainly(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def size_of_team(start: Callable[[str, Callable[[], None]], threading.Thread]) -> int:
    """How many threads the system runs for one that computes."""
    has_computed, may_end = threading.Event(), threading.Event()

    def work() -> None:
        torch.ones(1 << 20).add_(1.0)
        has_computed.set()
        may_end.wait(_SECONDS)

    before = set(Path("/proc/self/task").iterdir())
    thread = start("computes", work)
    assert has_computed.wait(_SECONDS)
    try:
        return len(set(Path("/proc/self/task").iterdir()) - before)
    finally:
        may_end.set()
        thread.join(_SECONDS)


def look_at_teams() -> None:
    """In a process of its own, where no other thread comes or goes."""
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1.0)
    assert size_of_team(start_plainly) == 2, "else nothing is shown below"
    assert size_of_team(start_thread) == 1
    assert torch.get_num_threads() == 2, "the engine keeps its own"


def test_torch_has_no_threads_of_its_own_in_ours() -> None:
    """More of them than cores, and the engine's would sleep between its loops."""
    code = f"from {__name__} import look_at_teams; look_at_teams()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120.0, check=False
    )
    assert ended.returncode == 0, ended.stderr
