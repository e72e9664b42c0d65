"""The promises hold in simulated worlds: the same few in `make test`, new ones in `make soak`.

Set ``SIMULATION_SECONDS`` for another time of the latter. It needs a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import ROOT

_START_SECONDS = 180  # vLLM and torch take their time on a busy machine


def _simulate(*arguments: str, seconds: float) -> str:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds + _START_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    )
    return done.stdout


def _run(seconds: float, first: int, folder: Path) -> dict[str, int]:
    jobs, file = os.cpu_count() or 1, folder / "numbers.json"
    _simulate(
        *("--seconds", str(seconds), "--first", str(first), "--jobs", str(jobs)),
        *("--json", str(file)),
        seconds=seconds,
    )
    numbers: dict[str, int] = json.loads(file.read_text())
    return numbers


def test_all_promises_hold_in_the_first_worlds() -> None:
    _simulate("--seeds", "40", "--jobs", "2", seconds=60)


@pytest.mark.soak  # a minute
@pytest.mark.timeout(900)
def test_all_promises_hold_in_every_world(tmp_path: Path) -> None:
    seconds = float(os.environ.get("SIMULATION_SECONDS", "60"))
    numbers = _run(seconds, 0, tmp_path)
    assert numbers["seeds"] > 10
    for name in ("requests", "hits from redis", "hits from memory", "values checked"):
        assert numbers[name] > 0, name


@pytest.mark.timeout(900)
def test_a_seed_repeats_itself() -> None:
    _simulate("--seeds", "8", "--replay", "--keep-going", seconds=60)


@pytest.mark.soak
@pytest.mark.timeout(4800)
def test_seeded_bugs_are_found() -> None:
    assert "all found" in _simulate("--mutations", seconds=2400)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_all_promises_hold_for_an_hour(tmp_path: Path) -> None:
    """On seeds that no run has seen."""
    seconds = float(os.environ.get("SIMULATION_SECONDS", "3600"))
    assert _run(seconds, int(time.time()) * 1000, tmp_path)["seeds"] > 100
