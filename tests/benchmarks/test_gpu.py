"""``make gpu`` where a machine is lent for minutes: nothing that was found out is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.gpu import Stage
from tests.support import ROOT
from tests.support.redis.server_groups import wait_until

QUICK = Stage("quick", ("-c", "print('done')"), 20.0)
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
ENDLESS = Stage("endless", ("-c", SLEEP), 600.0)


def stages_of(folder: Path) -> list[dict[str, Any]]:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return list(summary["stages"])


@pytest.fixture
def ended_in_the_middle(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    lines = (
        "from tests.benchmarks.test_gpu import ENDLESS, QUICK",
        "from benchmarks.harness import gpu",
        "gpu.all_stages = lambda *_, **__: iter([QUICK, ENDLESS])",
        f"gpu.main(['--out', {str(tmp_path)!r}])",
    )
    child = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    yield child
    child.kill()
    child.wait()


def test_the_summary_is_there_whenever_it_is_ended(
    ended_in_the_middle: subprocess.Popen[str], tmp_path: Path
) -> None:
    log = tmp_path / "endless.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "no stage has begun", 60.0)
    assert [one["stage"] for one in stages_of(tmp_path)] == ["quick"]
    ended_in_the_middle.send_signal(signal.SIGTERM)
    assert ended_in_the_middle.wait(30.0) == 128 + signal.SIGTERM
    assert not Path("/proc", log.read_text().split()[0]).exists()
