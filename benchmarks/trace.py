"""Realistic load on a served API: with the connector, without, and with LMCache's own.

Servers of one model run side by side: vLLM alone, with this connector (a small CPU tier and a
Valkey, 1.15 GiB together), and with ``LMCacheMPConnector`` and its server, which gets 3 GiB.
vLLM's own client replays the traces of :mod:`benchmarks.harness.workloads` on one server
after the other, each with fresh tokens, so that every replay begins cold. vLLM's paged cache is far
smaller than a trace's working set. Arrival rates are multiples of vLLM's own cold capacity,
measured first: below it, and above.

``not_won_...`` lists the measures that are worse than the other system's by more than ``TIE``. Each
replay runs ``--rounds`` times, with other tokens, arrivals and order of the systems; quantiles are
of all its requests together.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.harness.engines import Engines
from benchmarks.harness.plots import panels
from benchmarks.harness.ratios import in_turn
from benchmarks.harness.replay import CachedTokens, cached_tokens, replay
from benchmarks.harness.servers import warm_valkey
from benchmarks.harness.workloads import (
    PIECE_TOKENS,
    WORKLOADS,
    Ask,
    repeated_tokens,
    trace_lines,
    working_set_tokens,
)
from benchmarks.peers.connectors import lmcache_server, reason
from examples.tiny_model import DEMO_SHAPE
from tests.support.engines.api_server import ApiServer
from tests.support.engines.settings import tiered_transfer
from tests.support.processes import ServerError

LOADS = (0.7, 2.0)
PAGED_CACHE_MIB, CPU_TIER_GIB, PEER_GIB = 64, 0.15, 3.0
TIE = 1.05
_NONE, _OURS, _MP = "vllm", "ours", "lmcache_mp"
_AT_ONCE = 1000.0  # requests a second
_PIECES_PER_REPLAY = 100_000
_NUM_COLD = 6
_MEASURES = ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "requests_per_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = tuple(WORKLOADS)
    parser.add_argument("--workloads", nargs="*", choices=names, default=names)
    parser.add_argument(
        "--loads", type=float, nargs="*", default=LOADS, help="times vLLM's own cold capacity"
    )
    parser.add_argument("--rounds", type=int, default=1, help="per trace, load and system")
    parser.add_argument("--no-peers", action="store_true", help="leave LMCache's own out")


@dataclass(frozen=True)
class Replay:
    """One trace on one system. Latencies are in ms; ``from_...`` are shares of all prompt tokens.

    ``declined``: hits that were computed anyway, as a share of all prompt tokens;
    ``dropped_writes``: chunks that were not written to Redis.
    """

    workload: str
    load: float
    system: str
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    requests_per_s: float
    failed: int
    from_gpu: float
    from_cpu: float
    from_redis_or_server: float
    declined: float = 0.0
    dropped_writes: int = 0

    def over(self, other: Replay, measure: str) -> float:
        """Ratio to another replay: below 1 is better for every measure."""
        mine, theirs = getattr(self, measure), getattr(other, measure)
        return float(theirs / mine if measure == "requests_per_s" else mine / theirs)


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    unavailable: dict[str, str] = {}
    replays: list[Replay] = []
    rates: dict[str, float] = {}
    with warm_valkey() as valkey, Engines() as engines:
        bench = _Contest(engines, progress, unavailable)
        bench.start(valkey.url, peers=not args.no_peers)
        task = progress.add_task("replays", total=len(args.workloads) * (1 + len(args.loads)))
        for workload in args.workloads:
            progress.update(task, description=f"{workload}: what vLLM alone can do")
            rates[workload] = bench.cold_capacity(workload)
            progress.advance(task)
            for load in args.loads:
                progress.update(task, description=f"{workload} at {load:g} times that")
                replays += bench.replay_on_all(workload, load, load * rates[workload], args.rounds)
                progress.advance(task)
    return {
        "rounds": args.rounds,
        **headline(replays, _NONE, "vs_none"),
        **headline(replays, _MP, "vs_lmcache_mp"),
        "unavailable": unavailable,
        "paged_cache_tokens": (PAGED_CACHE_MIB << 20) // DEMO_SHAPE.kv_bytes_per_token,
        "cpu_tier_tokens": int(CPU_TIER_GIB * 2**30) // DEMO_SHAPE.kv_bytes_per_token,
        "workloads": [_workload_fields(name, rates[name]) for name in args.workloads],
        "replays": [vars(replay) for replay in replays],
    }


def headline(replays: Sequence[Replay], other: str, suffix: str) -> dict[str, Any]:
    """Ours over the other system: the worst and best of each measure, and the replays not won."""
    found = {(one.workload, one.load, one.system): one for one in replays}
    pairs = [
        (one, found[one.workload, one.load, other])
        for one in replays
        if one.system == _OURS and (one.workload, one.load, other) in found
    ]
    if not pairs:
        return {}
    fields: dict[str, Any] = {}
    for measure in _MEASURES:
        ratios = [one.over(theirs, measure) for one, theirs in pairs]
        name = "slowness" if measure == "requests_per_s" else measure.removesuffix("_ms")
        fields[f"{name}_{suffix}_worst"] = round(max(ratios), 3)
        fields[f"{name}_{suffix}_best"] = round(min(ratios), 3)
    fields[f"not_won_{suffix}"] = [
        f"{one.workload} at {one.load:g}: {measure} {ratio:.2f}"
        for one, theirs in pairs
        for measure in _MEASURES
        if (ratio := one.over(theirs, measure)) > TIE
    ]
    return fields


def draw(result: dict[str, Any], target: Path) -> None:
    """Time to first token, median and 90th percentile, of every replay."""
    cells = list(dict.fromkeys((r["workload"], r["load"]) for r in result["replays"]))
    systems = sorted({r["system"] for r in result["replays"]}, reverse=True)
    found = {(r["workload"], r["load"], r["system"]): r for r in result["replays"]}
    width = 0.8 / len(systems)
    with panels(target, 1, 2, (12, 4), dpi=90, sharey=True) as all_axes:
        for axes, quantile in zip(all_axes, ("p50", "p90"), strict=True):
            for number, system in enumerate(systems):
                heights = [
                    found.get((*cell, system), {}).get(f"ttft_{quantile}_ms", 0) for cell in cells
                ]
                places = [place + number * width for place in range(len(cells))]
                axes.bar(places, heights, width, label=system)
            names = [f"{workload}\n{load:g} times" for workload, load in cells]
            axes.set_xticks([place + 0.4 - width / 2 for place in range(len(cells))], names)
            axes.tick_params(axis="x", labelsize="small")
            axes.set(yscale="log", title=f"time to first token, {quantile}, ms")
        all_axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))


def _workload_fields(name: str, cold_per_second: float) -> dict[str, Any]:
    asks = WORKLOADS[name](random.Random(0), 0)
    return {
        "workload": name,
        "requests": len(asks),
        "prompt_tokens": sum(ask.num_tokens for ask in asks),
        "working_set_tokens": working_set_tokens(asks),
        "repeated": round(repeated_tokens(asks) / sum(ask.num_tokens for ask in asks), 3),
        "cold_capacity_requests_per_s": round(cold_per_second, 2),
    }


class _Contest:
    """All servers. ``unavailable`` gets the reason of a missing one."""

    def __init__(self, engines: Engines, progress: Progress, unavailable: dict[str, str]) -> None:
        self._engines = engines
        self._servers: dict[str, ApiServer] = {}
        self._unavailable = unavailable
        self._seeds = count(1)
        self._turns = count()
        self._progress = progress

    def start(self, redis_url: str, *, peers: bool) -> None:
        """Start all servers side by side, and warm them up."""
        task = self._progress.add_task("starting servers", total=3)
        self._serve(_NONE, None)
        self._serve(_OURS, tiered_transfer(cpu_gib=CPU_TIER_GIB, redis_url=redis_url))
        if peers:
            log = self._engines.folder / "lmcache-server.log"
            try:
                self._serve(_MP, self._engines.enter_context(lmcache_server(log, PEER_GIB)))
            except ServerError as error:
                self._unavailable[_MP] = reason(error)
        for name in list(self._servers):
            self._await(name)
            self._progress.advance(task)
        self._progress.remove_task(task)

    def _await(self, name: str) -> None:
        try:
            self._servers[name].wait_ready()
        except ServerError as error:
            self._excuse(name, name, error)
            del self._servers[name]
        else:
            self._replay(self._servers[name], self._fresh("prefixes")[:4], _AT_ONCE)

    def _excuse(self, name: str, what: str, error: Exception) -> None:
        """Other connectors may be missing; vLLM alone and this connector may not."""
        if name in (_NONE, _OURS):
            raise error
        self._unavailable[what] = reason(error)

    def _serve(self, name: str, transfer: dict[str, Any] | None) -> None:
        options = ("--kv-cache-memory-bytes", str(PAGED_CACHE_MIB << 20), "--max-model-len", "6144")
        self._servers[name] = self._engines.serve(name, transfer, *options)

    def cold_capacity(self, workload: str) -> float:
        """Requests a second of vLLM alone without hits: six prompts at once, from short to long."""
        fresh = []
        for i in range(_NUM_COLD):
            asks = sorted(self._fresh(workload), key=lambda ask: ask.num_tokens)
            fresh.append(asks[len(asks) * (2 * i + 1) // (2 * _NUM_COLD)])
        result = self._replay(self._servers[_NONE], fresh, _AT_ONCE)
        return float(result["request_throughput"])

    def replay_on_all(
        self, workload: str, load: float, per_second: float, rounds: int
    ) -> list[Replay]:
        """The same traces on every server, in changing order."""
        before = {name: cached_tokens(server) for name, server in self._servers.items()}
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in before}
        for _ in range(rounds):
            asks, seed = self._fresh(workload), next(self._seeds)
            for name in in_turn(self._servers, next(self._turns)):
                if name not in results:
                    continue
                try:
                    results[name].append(self._replay(self._servers[name], asks, per_second, seed))
                except (OSError, ValueError) as error:
                    self._excuse(name, f"{name}, {workload}", error)
                    del results[name]
        now = {name: cached_tokens(self._servers[name]) for name in results}
        return [
            _fields(workload, load, name, found, now[name].since(before[name]))
            for name, found in results.items()
        ]

    def _fresh(self, workload: str) -> list[Ask]:
        """The workload with tokens that no server has seen."""
        return WORKLOADS[workload](random.Random(0), next(self._seeds) * _PIECES_PER_REPLAY)

    def _replay(
        self, server: ApiServer, asks: Sequence[Ask], per_second: float, seed: int = 0
    ) -> dict[str, Any]:
        trace = self._engines.folder / "trace.jsonl"
        lines = trace_lines(random.Random(seed), asks, per_second)
        trace.write_text(lines, encoding="utf-8")
        return replay(server, self._engines.model, trace, PIECE_TOKENS)


def _fields(
    workload: str,
    load: float,
    system: str,
    results: Sequence[dict[str, Any]],
    cached: CachedTokens,
) -> Replay:
    """``results``: of vLLM's client, one per round."""
    ttfts = [
        1000 * seconds
        for result in results
        for seconds, error in zip(result["ttfts"], result["errors"], strict=True)
        if not error
    ]
    p50, p90, p99 = np.percentile(ttfts, (50, 90, 99)).tolist() if ttfts else [0.0] * 3
    total = max(1, cached.prompt)
    return Replay(
        workload=workload,
        load=load,
        system=system,
        ttft_p50_ms=round(p50, 1),
        ttft_p90_ms=round(p90, 1),
        ttft_p99_ms=round(p99, 1),
        requests_per_s=round(
            sum(r["completed"] for r in results) / sum(r["duration"] for r in results), 3
        ),
        failed=sum(r["failed"] for r in results),
        from_gpu=round(cached.device / total, 3),
        from_cpu=round(cached.host / total, 3),
        from_redis_or_server=round(cached.external / total, 3),
        declined=round(cached.declined / total, 3),
        dropped_writes=cached.dropped,
    )
