"""The connector's threads must not take the engine's cores."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from lmcache_connector.threads import start_thread

_TASKS = Path("/proc/self/task")
_SECONDS = 30.0


def start_plainly(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def size_of_team(start: Callable[[str, Callable[[], None]], threading.Thread]) -> int:
    """The number of system threads of one thread that computes."""
    has_computed, may_end = threading.Event(), threading.Event()

    def work() -> None:
        torch.ones(1 << 20).add_(1.0)
        has_computed.set()
        may_end.wait(_SECONDS)

    before = set(_TASKS.iterdir())
    thread = start("computes", work)
    assert has_computed.wait(_SECONDS)
    try:
        return len(set(_TASKS.iterdir()) - before)
    finally:
        may_end.set()
        thread.join(_SECONDS)


def look_at_teams() -> None:
    """Runs in its own process, where no other thread starts or ends."""
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1.0)
    assert size_of_team(start_plainly) == 2, "else nothing is shown below"
    assert size_of_team(start_thread) == 1
    assert torch.get_num_threads() == 2, "the engine keeps its own"


def test_torch_starts_no_threads_in_ours() -> None:
    """With more OpenMP threads than cores, the engine's would sleep between its loops."""
    code = f"from {__name__} import look_at_teams; look_at_teams()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120.0, check=False
    )
    assert ended.returncode == 0, ended.stderr
