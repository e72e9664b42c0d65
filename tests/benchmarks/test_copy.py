"""The benchmark says what it measured, in the one line others parse."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support import ROOT

OPTIONS = ("--mib", "32", "--layout", "BLNHC", "--block-size", "16", "--repeats", "1")


def test_the_last_line_is_the_result() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks", "copy", "--json", "-", *OPTIONS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    result = json.loads(found.stdout.splitlines()[-1])
    assert (result["device"], result["layout"], result["block_size"]) == ("cpu", "BLNHC", 16)
    assert result["mib"] == 32
    for way in ("d2h", "h2d"):
        ratio = result[f"{way}_gbps"] / result["memcpy_gbps"]
        assert abs(result[f"{way}_vs_memcpy"] - ratio) < 0.01
    assert {"machine", "versions"} <= result.keys()
