"""Benchmarks: their pages agree with their results, and two of them run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import gpu, report, results
from benchmarks.simulated_gpu import compare, headline, simulate
from tests.support import ROOT


def test_the_pages_in_the_tree_are_up_to_date() -> None:
    notes = report.NOTES.read_text(encoding="utf-8")
    pages = report.render(results.all_kept(), notes, results.FOLDER, report.TARGET)
    for path, page in pages.items():
        assert path.read_text(encoding="utf-8") == page, "python -m benchmarks report"


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


@pytest.mark.timeout(600)
def test_decisions_on_a_gpu_match_an_oracle() -> None:
    """In virtual time. Each pass checks the KV that it reads, and each load that no pass uses its
    blocks."""
    samples = simulate(
        {
            "--rounds": [2],
            "--step-ms": [10, 250],
            "--bus-gb-per-s": [3, 25],
            "--neighbours": [4],
            "--hits": [128, 2048],
        }
    )
    rows = compare(samples)
    names = "bus_gb_per_s", "step_ms", "hit_tokens"
    found_rows = {tuple(row[name] for name in names): row for row in rows}
    assert {key[0] for key, row in found_rows.items() if row["loaded"]} == {25.0}
    assert all(row["loaded"] == 1.0 for key, row in found_rows.items() if key[0] == 25.0)
    assert found_rows[25.0, 10.0, 128]["steps_lost"] < 0.5
    assert found_rows[25.0, 250.0, 2048]["steps_lost"] < 0.5
    found = headline(rows)
    assert found["steps_lost_p50"] < 0.5
    assert found["worst_ttft_vs_recompute"] <= 1.02
    assert found["ttft_vs_oracle_p50"] <= 1.1


def test_the_files_of_a_gpu_run_exist(tmp_path: Path) -> None:
    """CI has no GPU on which a file that was renamed would be missed."""
    stages = list(gpu.all_stages(tmp_path, is_rehearsal=False))
    paths = {word for stage in stages for word in stage.command if word.startswith("tests/")}
    assert any(path.startswith("tests/engine/") for path in paths)
    assert [path for path in paths if not (ROOT / path).exists()] == []
