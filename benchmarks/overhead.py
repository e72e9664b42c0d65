"""What the connector costs when it brings nothing: misses, stores, decode steps, scheduler time.

Three real engines of one model side by side: vLLM alone, one with a connector that stores nowhere
and finds nothing (``kv_consumer`` on an empty Valkey: every prompt is hashed and looked up), and
one that stores every prompt to the CPU tier and to Valkey (``kv_both``). They serve fresh prompts
in turn: there, and back in the opposite order.

Engines of the same configuration differ by more than what is to be measured: each process has a
speed of its own, drawn at its start. So the engines with a connector also take turns with
themselves: the connector is taken out of the running engine (the scheduler's, and the worker's that
every layer asks for) and put back. ``..._vs_none`` is with the connector over without it, in the
same process; ``..._vs_other_process`` is over the engine that never had one. All engines are
started ``--launches`` times; each figure is the median of the ratios of all rounds, with their
quartiles in ``ratios``. ``decode_step_cost_us`` is the loss of throughput as time: it grows with
layers and stored bytes, not with what a step computes.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.harness import spread
from benchmarks.models import MODELS
from benchmarks.served import (
    come_to_rest,
    decode_step_microseconds,
    decode_tokens_per_second,
    lookup_microseconds,
    random_prompt,
    ttft_seconds,
    without_connector,
)
from benchmarks.warm_server import warm_valkey
from tests.support.instance import VllmInstance
from tests.support.tiny_model import build_tiny_model

LOOKUP_TOKENS = 32_000
_NONE, _MISS, _COLD = "none", "kv_consumer", "kv_both"
_Way = tuple[str, bool]
"""An engine, and whether its connector is in it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--launches", type=int, default=3, help="starts of all engines")
    parser.add_argument("--rounds", type=int, default=4, help="there and back, per launch")
    parser.add_argument("--tokens", type=int, default=6000, help="length of a prompt")
    parser.add_argument("--decode-requests", type=int, default=8, help="that decode together")
    parser.add_argument("--decode-tokens", type=int, default=256, help="each of them generates")
    parser.add_argument("--decode-rounds", type=int, default=3, help="per launch")
    parser.add_argument("--chunk-size", type=int, help="of the connector, in tokens")


@dataclass
class Contest:
    """One figure per way and round. ``measure(call, seed)`` gets one by ``call(function, *args)``
    in the engine; ``rounds``: per launch."""

    title: str
    ways: tuple[_Way, ...]
    rounds: int
    measure: Callable[[Callable[..., Any], int], float]
    figures: dict[_Way, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self, engines: dict[str, VllmInstance], progress: Progress, launch: str) -> None:
        """A round goes through all ways there and back, and its figures are the means of both: who
        follows another process finds its memory cold. Who is first changes."""
        for number in progress.track(range(self.rounds), description=f"{launch}: {self.title}"):
            first = number % len(self.ways)
            order = self.ways[first:] + self.ways[:first]
            there = self._figures_of(engines, order, 2 * number + 1)
            back = self._figures_of(engines, order[::-1], 2 * number + 2)
            for way in self.ways:
                self.figures[way].append(statistics.fmean((there[way], back[way])))

    def _figures_of(
        self, engines: dict[str, VllmInstance], order: Sequence[_Way], seed: int
    ) -> dict[_Way, float]:
        taken = {}
        for name, connected in order:
            call = engines[name].call
            if name != _NONE and not connected:
                call = partial(call, without_connector)
            taken[name, connected] = self.measure(call, seed)
            engines[name].call(come_to_rest)
        return taken

    def ratios(self, way: _Way, reference: _Way) -> list[float]:
        pairs = zip(self.figures[way], self.figures[reference], strict=True)
        return [ours / theirs for ours, theirs in pairs]


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    without, miss, cold = (_NONE, False), (_MISS, True), (_COLD, True)
    miss_out, cold_out = (_MISS, False), (_COLD, False)
    ttfts = Contest(
        "time to first token",
        (without, miss_out, miss, cold_out, cold),
        args.rounds,
        partial(_ttft, args.tokens),
    )
    speeds = Contest(
        "decode throughput",
        (without, cold_out, cold),
        args.decode_rounds,
        partial(_decode_speed, args.decode_requests, args.decode_tokens),
    )
    steps, lookups, store_jobs = [], [], 0
    for launch in range(args.launches):
        with _engines(args) as engines:
            for engine in engines.values():  # compilation, first touches, first figures
                for seed in range(2):
                    engine.call(ttft_seconds, random_prompt(10_000 + seed, args.tokens))
            for contest in (ttfts, speeds):
                contest.run(engines, progress, f"launch {launch + 1} of {args.launches}")
            both = engines[_COLD]
            prompts = [random_prompt(50_000 + i, 64) for i in range(args.decode_requests)]
            steps.append(both.call(decode_step_microseconds, prompts, args.decode_tokens))
            lookups.append(both.call(lookup_microseconds, LOOKUP_TOKENS, 40))
            store_jobs += int(both.counts().total("store_jobs"))
    ratios = {
        "miss_ttft": ttfts.ratios(miss, miss_out),
        "cold_ttft": ttfts.ratios(cold, cold_out),
        "decode_throughput": speeds.ratios(cold, cold_out),
    }
    others = {
        "miss_ttft": ttfts.ratios(miss, without),
        "cold_ttft": ttfts.ratios(cold, without),
        "decode_throughput": speeds.ratios(cold, without),
    }
    return {
        "launches": args.launches,
        "rounds": len(ratios["miss_ttft"]),
        "decode_rounds": len(ratios["decode_throughput"]),
        "model": args.model,
        "prompt_tokens": args.tokens,
        **{f"{name}_vs_none": round(statistics.median(r), 4) for name, r in ratios.items()},
        **{
            f"{name}_vs_other_process": round(statistics.median(r), 4) for name, r in others.items()
        },
        "decode_step_cost_us": round(_step_cost_us(speeds, cold, cold_out, args.decode_requests)),
        "decode_step_scheduler_us_per_request": round(statistics.median(steps), 2),
        "lookup_32k_tokens_us": round(statistics.median(lookups), 1),
        "ttft_none_s": round(statistics.median(ttfts.figures[without]), 4),
        "decode_none_tokens_per_s": round(statistics.median(speeds.figures[without]), 1),
        "store_jobs": store_jobs,
        "ratios": [
            {"figure": name, "against": against, **spread(found)}
            for against, figures in (("same process", ratios), ("other process", others))
            for name, found in figures.items()
        ],
    }


@contextlib.contextmanager
def _engines(args: argparse.Namespace) -> Iterator[dict[str, VllmInstance]]:
    """One instance per way to run, in this order."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = build_tiny_model(folder / "model", MODELS[args.model])
        valkey = stack.enter_context(warm_valkey())
        namespaces = {_MISS: "never-written", _COLD: "written"}
        engines = {}
        for name in (_NONE, _MISS, _COLD):
            transfer = None
            if name in namespaces:
                extra = {"cpu_gib": 2.0, "redis_url": valkey.url, "namespace": namespaces[name]}
                if args.chunk_size is not None:
                    extra["chunk_size"] = args.chunk_size
                transfer = {
                    "kv_connector": "LMCacheTieredConnector",
                    "kv_role": name,
                    "kv_connector_extra_config": extra,
                }
            engines[name] = stack.enter_context(
                VllmInstance(
                    model,
                    transfer,
                    folder / f"{name}.log",
                    max_num_batched_tokens=max(8192, args.tokens),
                )
            )
        yield engines


def _ttft(num_tokens: int, call: Callable[..., Any], seed: int) -> float:
    taken: float = call(ttft_seconds, random_prompt(seed, num_tokens))
    return taken


def _decode_speed(num_requests: int, num_tokens: int, call: Callable[..., Any], seed: int) -> float:
    """Also through the chunks that fill with generated tokens, and are stored."""
    prompts = [random_prompt(1000 * seed + i, 200) for i in range(num_requests)]
    speed: float = call(decode_tokens_per_second, prompts, num_tokens)
    return speed


def _step_cost_us(speeds: Contest, way: _Way, reference: _Way, num_requests: int) -> float:
    """By how much longer a decode step takes, with its part of all stores and writes."""
    steps = {
        one: [1e6 * num_requests / speed for speed in speeds.figures[one]]
        for one in (way, reference)
    }
    pairs = zip(steps[way], steps[reference], strict=True)
    return statistics.median(ours - theirs for ours, theirs in pairs)
