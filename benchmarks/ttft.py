"""Time to first token, cold and from every tier, compared with other connectors.

Engines of one model run side by side and serve prompts of the same lengths in turn: vLLM alone
(cold, and as a hit of its own prefix cache, here ``gpu_hit``), this connector (cold, from CPU
memory, and from a Valkey that another process has filled), and the connectors of
:mod:`benchmarks.peers.connectors` (cold, and again: ``hit``, if it is one). The order changes from
round to round. vLLM's own prefix cache is reset before each hit of a connector, and the CPU tier
emptied before each Redis hit; ``weights`` measures a hit right after a reset. ``cached_tokens``
proves hits and misses: the least of the rounds, of a cold way the most. ``vllm_cold_same_process``
is our engine with its connector taken out for a moment: two processes differ by a few per cent
whatever they run, so the cost of a cold prompt is measured in one process, and also against vLLM
alone.

Ratios are medians of the rounds' ratios. Connectors that cannot run here are listed under
``unavailable``, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.harness.engine_timings import (
    come_to_rest,
    empty_cpu_tier,
    probe_link,
    ttft_and_cached,
    without_connector,
)
from benchmarks.harness.engines import MODELS, Engines
from benchmarks.harness.plots import panels
from benchmarks.harness.ratios import in_turn, median, pairwise, spread
from benchmarks.harness.servers import warm_valkey
from benchmarks.peers.connectors import let_numba_come_early, lmcache_server, reason, transfers
from tests.support.engines.instance import InstanceError, VllmInstance
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import random_prompt, tiered_transfer
from tests.support.processes import ServerError

TOKENS = (1000, 4000, 16000)
HITS_PER_ROUND = 3
_NONE, _OURS, _MP = "vllm", "ours", "lmcache_mp"
_SLOW = "lmcache_v1"  # each request waits for a time-out: one round, one hit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=("tiny", "large"))
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="prompt lengths")
    parser.add_argument("--rounds", type=int, default=9, help="for short prompts; fewer for long")
    parser.add_argument("--chunk-size", type=int, default=128, help="of this connector, in tokens")
    parser.add_argument("--no-peers", action="store_true", help="leave other connectors out")


@dataclass
class Case:
    """All times of one model and prompt length. ``seconds[way][round]``: that round's median."""

    model: str
    tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    def add(self, way: str, served: Sequence[tuple[float, int]]) -> None:
        """Add one round. ``served``: seconds and cached tokens of its requests."""
        seconds = statistics.median(taken for taken, _ in served)
        self.seconds.setdefault(way, []).append(seconds)
        worst = max if "cold" in way else min
        found = [cached for _, cached in served]
        self.cached[way] = worst(*found, self.cached.get(way, found[0]))

    def ratios(self, way: str, reference: str) -> list[float]:
        """Ratios of the rounds that have both."""
        return pairwise(self.seconds.get(way, ()), self.seconds.get(reference, ()))


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    cases: list[Case] = []
    unavailable: dict[str, str] = {}
    for model in args.models:
        with Engines(MODELS[model]) as engines:
            cases += _Contest(model, args, engines, unavailable, progress).run()
    return {
        **headline(cases),
        "chunk_size": args.chunk_size,
        "unavailable": unavailable,
        "cases": [fields for case in cases for fields in _case_fields(case)],
    }


def headline(cases: Sequence[Case]) -> dict[str, Any]:
    """One ratio per promise: the median over all rounds, and the worst case's median."""
    promises = {
        "ours_cold_vs_none": ("ours_cold", "vllm_cold_same_process", max),
        "ours_cold_vs_other_process": ("ours_cold", "vllm_cold", max),
        "ours_cpu_hit_vs_gpu_hit": ("ours_cpu_hit", "gpu_hit", max),
        "ours_redis_hit_vs_gpu_hit": ("ours_redis_hit", "gpu_hit", max),
        "lmcache_mp_hit_vs_ours": ("lmcache_mp_hit", "ours_cpu_hit", min),
    }
    fields: dict[str, Any] = {}
    for name, (way, reference, worst) in promises.items():
        ratios = [found for case in cases if (found := case.ratios(way, reference))]
        if ratios:
            fields[name] = median(list(chain.from_iterable(ratios)), 3)
            fields[f"{name}_worst_case"] = round(worst(map(statistics.median, ratios)), 3)
    return fields


_LINES = {
    "vllm_cold": "computed",
    "lmcache_mp_hit": "LMCacheMPConnector, hit",
    "vllm_offloading_hit": "vLLM's OffloadingConnector",
    "ours_redis_hit": "this connector, Redis",
    "ours_cpu_hit": "this connector, CPU tier",
    "gpu_hit": "vLLM's own hit",
}


def draw(result: dict[str, Any], target: Path) -> None:
    """Time to first token over prompt length, a line per way, a panel per model."""
    models = list(dict.fromkeys(case["model"] for case in result["cases"]))
    with panels(target, 1, len(models), (6.5 * len(models), 3.8), dpi=110) as all_axes:
        for axes, model in zip(all_axes, models, strict=True):
            for way, label in _LINES.items():
                points = [
                    (case["tokens"], 1000 * case["ttft_s"]["median"])
                    for case in result["cases"]
                    if (case["model"], case["way"]) == (model, way)
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o", label=label)
            axes.set(xscale="log", yscale="log", xlabel="prompt tokens")
            axes.set(ylabel="time to the first token, ms")
            lengths = sorted({case["tokens"] for case in result["cases"]})
            axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        all_axes[-1].legend(loc="upper left")


def _rounds(most: int, tokens: int) -> int:
    """Long prompts take long, and vary less."""
    return max(min(most, 3), round(most * min(1.0, math.pow(1000 / tokens, 0.3))))


def _case_fields(case: Case) -> list[dict[str, Any]]:
    cold = statistics.median(case.seconds["vllm_cold"])
    return [
        {
            "model": case.model,
            "tokens": case.tokens,
            "way": way,
            "ttft_s": spread(seconds),
            "vs_cold": round(statistics.median(seconds) / cold, 3),
            "cached_tokens": case.cached[way],
            "rounds": len(seconds),
        }
        for way, seconds in case.seconds.items()
    ]


@dataclass
class _Contest:
    """All engines of one model. ``unavailable`` gets the reason of a missing one."""

    model: str
    args: argparse.Namespace
    engines: Engines
    unavailable: dict[str, str]
    progress: Progress
    running: dict[str, VllmInstance] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token_bytes = MODELS[self.model].kv_bytes_per_token
        self.rounds = {
            tokens: _rounds(self.args.rounds, tokens) for tokens in sorted(self.args.tokens)
        }
        self.cpu_gib = max(2.0, 4 * max(self.rounds) * self.token_bytes / 2**30)
        self.task = self.progress.add_task(self.model, total=sum(self.rounds.values()))

    def run(self) -> list[Case]:
        cases = []
        tokens = sum(length * rounds for length, rounds in self.rounds.items())
        mib = max(3072, int(1.3 * tokens * self.token_bytes) >> 20)
        valkey = self.engines.enter_context(warm_valkey(mib))
        ours = tiered_transfer(
            cpu_gib=self.cpu_gib, redis_url=valkey.url, chunk_size=self.args.chunk_size
        )
        self._fill(ours)
        self._start(_NONE, None)
        self._start(_OURS, ours)
        if not self.args.no_peers:
            self._start_peers()
        self._warm_up()
        for tokens, rounds in self.rounds.items():
            case = Case(self.model, tokens)
            for number in range(rounds):
                self._round(case, number)
                self.progress.advance(self.task)
            cases.append(case)
        return cases

    # -- engines ---------------------------------------------------------------------------------

    def _fill(self, transfer: dict[str, Any]) -> None:
        """Another process stores the prompts of Redis hits, and ends."""
        self._describe("another process fills Redis")
        with self.engines.instance("writer", transfer, **self._sizes()) as writer:
            for tokens, rounds in self.rounds.items():
                for number in range(rounds):
                    writer.call(ttft_and_cached, _written_prompt(tokens, number))
                    writer.call(come_to_rest)

    def _start_peers(self) -> None:
        all_tokens = sum(tokens * rounds for tokens, rounds in self.rounds.items())
        gib = 1.5 * all_tokens * self.token_bytes / 2**30 + 1
        log = self.engines.folder / "lmcache-server.log"
        try:
            self._start(_MP, self.engines.enter_context(lmcache_server(log, gib)))
        except ServerError as error:
            self.unavailable[_MP] = reason(error)
        for name, transfer in transfers(int(self.cpu_gib * 2**30)).items():
            if name not in self.unavailable:
                self._start(name, transfer)

    def _start(self, name: str, transfer: dict[str, Any] | None) -> None:
        self._describe(f"{name} starts")
        prepare = let_numba_come_early if name == _MP else None
        options = self._sizes() | {"prepare": prepare}
        try:
            self.running[name] = self.engines.start(name, transfer, **options)
        except InstanceError as error:
            self._give_up(name, error)

    def _sizes(self) -> dict[str, Any]:
        longest = max(self.rounds)
        return {
            "max_num_batched_tokens": 8192,
            "max_model_len": longest + 64,
            "kv_cache_memory_bytes": max(256 << 20, 2 * longest * self.token_bytes),
        }

    def _give_up(self, name: str, error: InstanceError) -> None:
        """Leave a connector out from here on. vLLM alone and this connector may not fail."""
        if name in (_NONE, _OURS):
            raise error
        self.running.pop(name, None)
        self.unavailable[name] = reason(error)

    def _warm_up(self) -> None:
        """Compilation, page faults, and the connector's measurements of speeds."""
        for name in list(self.running):
            self._describe(f"{name} warms up")
            with self._peer(name) as engine:
                for seed in range(1 if name == _SLOW else 3):
                    engine.call(ttft_and_cached, random_prompt(seed, 1000))
                    engine.call(come_to_rest)
        self.running[_OURS].call(probe_link)

    # -- measurements ----------------------------------------------------------------------------

    def _round(self, case: Case, number: int) -> None:
        for name in in_turn(self.running, number):
            if name == _SLOW and number > 0:
                continue
            self._describe(f"{case.tokens} tokens, {name}")
            with self._peer(name) as engine:
                prompt = random_prompt(1_000_000_000 + 1000 * case.tokens + number, case.tokens)
                if name == _NONE:
                    _measure_none(case, engine, prompt)
                elif name == _OURS:
                    _measure_ours(case, engine, prompt, number)
                else:
                    _measure_peer(case, name, engine, prompt)

    @contextlib.contextmanager
    def _peer(self, name: str) -> Iterator[VllmInstance]:
        try:
            yield self.running[name]
        except InstanceError as error:
            self._give_up(name, error)

    def _describe(self, what: str) -> None:
        self.progress.update(self.task, description=f"{self.model}: {what}")


def _measure_none(case: Case, engine: VllmInstance, prompt: list[int]) -> None:
    case.add("vllm_cold", [engine.call(ttft_and_cached, prompt)])
    case.add("gpu_hit", [engine.call(ttft_and_cached, prompt) for _ in range(HITS_PER_ROUND)])
    engine.call(come_to_rest)


def _measure_ours(case: Case, engine: VllmInstance, prompt: list[int], number: int) -> None:
    cold = {
        "ours_cold": lambda: engine.call(ttft_and_cached, prompt),
        "vllm_cold_same_process": lambda: engine.call(without_connector, ttft_and_cached, prompt),
    }
    for way in cold if number % 2 else reversed(cold):
        case.add(way, [cold[way]()])
        engine.call(come_to_rest)
    case.add("ours_cpu_hit", [_again(engine, prompt) for _ in range(HITS_PER_ROUND)])
    written = _written_prompt(case.tokens, number)
    hits = [engine.call(_from_redis, written) for _ in range(HITS_PER_ROUND)]
    case.add("ours_redis_hit", hits)
    engine.call(come_to_rest)


def _measure_peer(case: Case, name: str, engine: VllmInstance, prompt: list[int]) -> None:
    case.add(f"{name}_cold", [engine.call(ttft_and_cached, prompt)])
    hits = 1 if name == _SLOW else HITS_PER_ROUND
    case.add(f"{name}_hit", [_again(engine, prompt) for _ in range(hits)])
    engine.call(come_to_rest)


def _again(engine: VllmInstance, prompt: list[int]) -> tuple[float, int]:
    """Serve it again after all writes, without vLLM's own prefix cache."""
    engine.call(come_to_rest)
    served: tuple[float, int] = engine.call(ttft_and_cached, prompt)
    return served


def _from_redis(probe: EngineProbe, prompt: list[int]) -> tuple[float, int]:
    empty_cpu_tier(probe)
    return ttft_and_cached(probe, prompt)


def _written_prompt(tokens: int, number: int) -> list[int]:
    return random_prompt(2_000_000 + 1000 * tokens + number, tokens)
