"""What the benchmarks conclude from what they measured, on made-up measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth, trace, ttft
from benchmarks.growth import Curve
from benchmarks.trace import Replay


def case(tokens: int, **seconds: list[float]) -> ttft.Case:
    found = ttft.Case("tiny", tokens)
    for way, rounds in seconds.items():
        for taken in rounds:
            found.add(way, [(taken, 0)])
    return found


def test_ttft_ratios_are_of_pairs() -> None:
    """A drift that hits both in a round leaves their ratio alone."""
    drifting = case(1000, vllm_cold_same_process=[1.0, 2.0, 4.0], ours_cold=[1.1, 2.2, 4.4])
    other = case(4000, vllm_cold_same_process=[1.0] * 3, ours_cold=[1.3] * 3)
    fields = ttft.headline([drifting, other])
    assert fields["ours_cold_vs_none"] == pytest.approx(1.2)
    assert fields["ours_cold_vs_none_worst_case"] == pytest.approx(1.3)
    assert "lmcache_mp_hit_vs_ours" not in fields, "a peer that did not run has no ratio"


def test_a_peer_is_worst_where_it_is_closest() -> None:
    near = case(1000, lmcache_mp_hit=[0.2], ours_cpu_hit=[0.1])
    far = case(4000, lmcache_mp_hit=[2.0], ours_cpu_hit=[0.1])
    assert ttft.headline([near, far])["lmcache_mp_hit_vs_ours_worst_case"] == pytest.approx(2.0)


def test_a_round_counts_its_worst_proof_of_a_hit() -> None:
    found = ttft.Case("tiny", 1000)
    found.add("ours_cpu_hit", [(0.1, 768), (0.3, 512), (0.2, 768)])
    assert found.seconds["ours_cpu_hit"] == [0.2]
    assert found.cached["ours_cpu_hit"] == 512


def replayed(system: str, p50: float, per_second: float, load: float = 0.5) -> Replay:
    return Replay("chat", load, system, p50, 2 * p50, 3 * p50, per_second, 0, 0.1, 0.0, 0.0)


def test_what_was_not_won_is_named() -> None:
    replays = [replayed("vllm", 100, 2.0), replayed("ours", 50, 1.0)]
    fields = trace.headline(replays, "vllm", "vs_none")
    assert fields["ttft_p50_vs_none_worst"] == 0.5
    assert fields["slowness_vs_none_worst"] == 2.0
    assert fields["not_won_vs_none"] == ["chat at 0.5: requests_per_s 2.00"]
    assert trace.headline(replays, "lmcache_mp", "vs_lmcache_mp") == {}


def test_a_tie_is_no_loss() -> None:
    replays = [replayed("vllm", 100, 2.0), replayed("ours", 104, 1.95)]
    assert trace.headline(replays, "vllm", "vs_none")["not_won_vs_none"] == []


@pytest.mark.parametrize(
    ("bound", "y", "within"),
    [
        (1, lambda x: 5 + 3 * x, True),
        (1, lambda x: x * x, False),
        (0, lambda x: 7.0, True),
        (0, lambda x: x**0.5, False),
    ],
)
def test_a_curve_knows_how_it_grows(bound: int, y: Any, within: bool) -> None:
    points = tuple((float(x), float(y(x))) for x in (1, 10, 100, 1000))
    assert Curve("c", "x", "y", bound, points).within is within


def test_plots_are_small_files(tmp_path: Path) -> None:
    points = ((1.0, 2.0), (10.0, 21.0), (100.0, 190.0))
    curves = [Curve(f"c{i}", "x", "y", 1, points).fields() for i in range(15)]
    replays = [vars(replayed(s, 10, 1.0, load)) for s in ("vllm", "ours") for load in (0.5, 2.0)]
    cases = [
        {"model": model, "tokens": tokens, "way": way, "ttft_s": {"median": 0.1}}
        for model in ("tiny", "large")
        for tokens in (1000, 4000)
        for way in ("vllm_cold", "gpu_hit")
    ]
    growth.draw({"curves": curves}, tmp_path / "growth.png")
    trace.draw({"replays": replays}, tmp_path / "trace.png")
    ttft.draw({"cases": cases}, tmp_path / "ttft.png")
    for plot in tmp_path.iterdir():
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert plot.stat().st_size < 150_000
