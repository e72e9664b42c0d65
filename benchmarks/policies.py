"""The CPU tier's savings of prefill on block traces, by eviction policy.

No engine runs: traces have the blocks of each prompt, and policies say which are cached. ``ours``
is the policy that LMCache calls in the product; ``belady`` knows the future and is the limit. Sizes
are shares of the working set, all distinct blocks of a trace.

Savings are shares of all prefill, in which a token after ``c`` others costs ``1 + c / 30,000``: on
an 8B model attention over 30,000 tokens takes about as long as all other work. ``gap_closed`` is
``(saved - lru) / (belady - lru)``.

``stores`` compares two times of a store: when blocks are computed, and late, when the paged cache
is about to evict them. The paged cache has a quarter of the tier's size.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.harness.block_traces import BlockTrace, read_trace
from benchmarks.peers.cache_policies import (
    Belady,
    ByTurns,
    Lru,
    Ours,
    Peer,
    Policy,
    Requests,
    libcachesim_peers,
)
from benchmarks.peers.two_tiers import replay

SAMPLE = Path(__file__).parent / "traces" / "sample.jsonl"
DIVISORS = (16, 8, 4)
_EQUAL_TOKENS = 30_000
_PAGED_DIVISOR = 4

MakePolicy = Callable[[int, Requests], Policy]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces", type=Path, nargs="*", default=[SAMPLE], help=".jsonl or .tar.gz; else a sample"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave libcachesim's policies out")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    contestants = _contestants(progress, peers=not args.no_peers)
    traces = [read_trace(path) for path in args.traces]
    rows = [
        _row(trace, divisor, contestants)
        for trace in progress.track(traces, description="traces")
        for divisor in DIVISORS
    ]
    stores = [_stores(trace, divisor) for trace in traces for divisor in DIVISORS]
    peers = "libcachesim" if "lfu" in contestants else "none"
    return {**headline(rows), "peers": peers, "sizes": rows, "stores": stores}


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each policy: the closed share of the gap to Belady's, and its worst saving over LRU's."""
    small = [row for row in rows if row["size"] == "1/16"]
    names = [name for name in rows[0]["saved"] if name not in ("lru", "belady", "ours")]
    return {
        "gap_closed_1_16": _mean_gap(small, "ours"),
        "worst_saved_vs_lru": round(min(_against_lru(row["saved"], "ours") for row in rows), 4),
        **{f"{name}_gap_closed_1_16": _mean_gap(small, name) for name in names},
        **{
            f"{name}_worst_saved_vs_lru": round(
                min(_against_lru(row["saved"], name) for row in rows), 4
            )
            for name in names
        },
    }


def saved_share(trace: BlockTrace, policy: Policy) -> float:
    """The saved share of the prefill of all prompts."""
    return _saved(trace, [policy.serve(at, blocks) for at, blocks in trace.requests])


def _saved(trace: BlockTrace, found: Sequence[int]) -> float:
    """``found``: the number of each prompt's leading blocks that were cached."""
    saved = total = 0.0
    longest = max(len(blocks) for _, blocks in trace.requests)
    cost_of_first = [0.0]
    for block in range(longest):
        cost_of_first.append(cost_of_first[-1] + 1 + block * trace.block_tokens / _EQUAL_TOKENS)
    for num_found, (_, blocks) in zip(found, trace.requests, strict=True):
        saved += cost_of_first[num_found]
        total += cost_of_first[len(blocks)]
    return saved / total


def _contestants(progress: Progress, *, peers: bool) -> dict[str, MakePolicy]:
    found: dict[str, MakePolicy] = {"ours": Ours, "lru": Lru, "belady": Belady, "by_turns": ByTurns}
    if not peers:
        return found
    kinds = libcachesim_peers()
    if not kinds:
        progress.console.log("libcachesim is not installed: no peers (pip install libcachesim)")
    return found | {name: partial(_peer, kind) for name, kind in kinds.items()}


def _peer(kind: type, capacity: int, requests: Requests) -> Policy:
    return Peer(kind, capacity)


def _row(trace: BlockTrace, divisor: int, contestants: Mapping[str, MakePolicy]) -> dict[str, Any]:
    capacity = max(1, trace.num_blocks // divisor)
    saved = {
        name: saved_share(trace, make(capacity, trace.requests))
        for name, make in contestants.items()
    }
    return {
        "trace": trace.name,
        "size": f"1/{divisor}",
        "blocks": capacity,
        "saved": {name: round(share, 4) for name, share in saved.items()},
    }


def _stores(trace: BlockTrace, divisor: int) -> dict[str, Any]:
    """Block counts are per computed block."""
    capacity = max(4, trace.num_blocks // divisor)
    ways = {
        name: replay(trace.requests, capacity // _PAGED_DIVISOR, capacity, late=late)
        for name, late in (("at_once", False), ("late", True))
    }
    fields: dict[str, Any] = {"trace": trace.name, "size": f"1/{divisor}"}
    for name, way in ways.items():
        fields[f"saved_{name}"] = round(_saved(trace, way.found), 4)
        fields[f"stored_{name}"] = round(way.stored / max(1, way.computed), 4)
    step = ways["late"].most_at_once / (capacity // _PAGED_DIVISOR)
    return fields | {"paged_cache_in_one_step_late": round(step, 3)}


def _mean_gap(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return round(statistics.mean(_gap(row["saved"], name) for row in rows), 4)


def _gap(saved: Mapping[str, float], name: str) -> float:
    """0 without a gap."""
    gap = saved["belady"] - saved["lru"]
    return (saved[name] - saved["lru"]) / gap if gap > 0 else 0.0


def _against_lru(saved: Mapping[str, float], name: str) -> float:
    return saved[name] / saved["lru"] if saved["lru"] > 0 else 1.0
