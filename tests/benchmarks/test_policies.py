"""Traces are read as published, and what is replayed against them is right on made-up ones."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from pathlib import Path

import pytest

from benchmarks import policies
from benchmarks.harness.block_traces import BlockTrace, read_trace
from benchmarks.peers.cache_policies import Belady, ByTurns, Lru, Ours
from benchmarks.peers.two_tiers import Stored, replay


def mooncake(path: Path, requests: list[tuple[int, list[int]]]) -> Path:
    lines = [json.dumps({"timestamp": at, "hash_ids": ids}) for at, ids in requests]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def sessions(path: Path, scope: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for number in range(2):
            session = {
                "block_size": 64,
                "hash_id_scope": scope,
                "requests": [{"t": 5.0 - number, "hash_ids": [7, 8]}, {"t": 9.0, "type": "x"}],
            }
            data = json.dumps(session).encode()
            member = tarfile.TarInfo(f"traces/{number}.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_requests_come_in_their_order(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path / "some_trace.jsonl.gz", [(2000, [5, 9]), (1000, [5])]))
    assert trace == BlockTrace("some_trace", 512, [(1.0, [0]), (2.0, [0, 1])], 2)


@pytest.mark.parametrize(("scope", "num_blocks"), [("local", 4), ("global", 2)])
def test_sessions_share_blocks_where_they_say_so(
    tmp_path: Path, scope: str, num_blocks: int
) -> None:
    trace = read_trace(sessions(tmp_path / "agents.tar.gz", scope))
    assert (trace.block_tokens, trace.num_blocks) == (64, num_blocks)
    assert [at for at, _ in trace.requests] == [4.0, 5.0]


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


def test_the_headline_is_the_mean_gap_at_a_sixteenth_and_the_worst_of_all() -> None:
    rows = [
        {"size": "1/16", "saved": {"lru": 0.2, "belady": 0.4, "ours": 0.25, "lfu": 0.1}},
        {"size": "1/16", "saved": {"lru": 0.4, "belady": 0.4, "ours": 0.4, "lfu": 0.4}},
        {"size": "1/4", "saved": {"lru": 0.5, "belady": 0.6, "ours": 0.45, "lfu": 0.5}},
    ]
    fields = policies.headline(rows)
    assert fields["gap_closed_1_16"] == 0.125
    assert fields["worst_saved_vs_lru"] == 0.9
    assert fields["lfu_gap_closed_1_16"] == -0.25
    assert fields["lfu_worst_saved_vs_lru"] == 0.5


def test_what_is_stored_late_is_stored_when_the_paged_cache_loses_it() -> None:
    requests = [(0.0, [0, 1]), (1.0, [2, 3]), (2.0, [0, 1])]
    late = replay(requests, paged_blocks=3, tier_blocks=10, late=True)
    assert late == Stored(found=(0, 0, 2), computed=4, stored=2, most_at_once=1)
    at_once = replay(requests, paged_blocks=3, tier_blocks=10, late=False)
    assert at_once == Stored(found=(0, 0, 2), computed=4, stored=4, most_at_once=2)


def test_the_sample_is_a_trace() -> None:
    trace = read_trace(policies.SAMPLE)
    assert len(trace.requests) > 300
    assert trace.num_blocks > 1000
