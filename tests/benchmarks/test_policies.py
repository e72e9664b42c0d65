"""Traces are read as published, and what is replayed against them is right on made-up ones."""

from __future__ import annotations

import random

import pytest

from benchmarks import policies
from benchmarks.harness.block_traces import BlockTrace, read_trace
from benchmarks.peers.cache_policies import Belady, ByTurns, Lru, Ours


def made_up(seed: int) -> BlockTrace:
    """Prompts of a tree, of which some beginnings are common."""
    rng, found = random.Random(seed), []
    for number in range(300):
        path = [rng.choice((0, 0, 0, 1)) for _ in range(rng.randint(1, 8))]
        numbers = [int("1" + "".join(map(str, path[: i + 1])), 2) for i in range(len(path))]
        found.append((float(number), numbers))
    return BlockTrace("made up", 512, found, 512)


@pytest.mark.parametrize("seed", range(3))
def test_ours_is_lru_and_nobody_beats_the_optimum(seed: int) -> None:
    trace = made_up(seed)
    for capacity in (10, 30):
        saved = {
            kind.__name__: policies.saved_share(trace, kind(capacity, trace.requests))
            for kind in (Ours, Lru, Belady, ByTurns)
        }
        assert saved["Ours"] == pytest.approx(saved["Lru"], abs=0.01)
        assert all(0 < share <= saved["Belady"] for share in saved.values())


def test_the_sample_is_a_trace() -> None:
    trace = read_trace(policies.SAMPLE)
    assert len(trace.requests) > 300
    assert trace.num_blocks > 1000
