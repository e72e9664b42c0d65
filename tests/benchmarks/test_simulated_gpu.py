"""The benchmark on a simulated GPU: what it concludes, and what a few of its requests show."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulated_gpu import compare, headline, simulate


def sample(rule: str, number: int, ttft: float) -> dict[str, Any]:
    setting = {"step_ms": 10.0, "bus_gb_per_s": 25.0, "neighbours": 4, "crowd": 1}
    measured = {"rule": rule, "hit_tokens": 128, "round": number, "ttft": ttft, "loaded": False}
    return setting | measured


@pytest.mark.timeout(600)
def test_decisions_on_a_gpu_are_those_of_an_oracle() -> None:
    """In virtual time. Each pass checks that what was loaded is right, and each load that no pass
    under way still uses its blocks."""
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


@pytest.mark.soak  # half a minute of Triton's interpreter; `make gpu` runs the storms
@pytest.mark.timeout(300)
def test_the_storms_on_a_gpu_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In real time, with the copies of a GPU and LMCache's engine. Each pass compares the KV before
    its tokens: a prompt that was loaded is right, or this fails."""
    pytest.importorskip("triton", reason="runs where Triton is installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    samples = simulate(
        {
            "--device": ["rehearsed"],
            "--rounds": [1],
            "--step-ms": [10],
            "--neighbours": [2],
            "--hits": [256],
        }
    )
    loaded = {sample["rule"]: sample["loaded"] for sample in samples}
    assert loaded.keys() == {"auto", "never", "always", "own"}
    assert loaded["always"]
    assert not loaded["never"]
