"""Triton kernels, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT


def run_python(*arguments: str, **environment: str) -> str:
    """In a process of its own: Triton decides when it is loaded whether it interprets."""
    pytest.importorskip("triton", reason="runs where Triton is installed")
    found = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout
