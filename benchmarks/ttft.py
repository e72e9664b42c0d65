"""Time to first token, cold and from every tier, side by side with the peers.

Engines of one model live side by side and serve prompts of the same lengths in turn: vLLM alone
(cold, and as a hit of its own prefix cache, here ``gpu_hit``), this connector (cold, from CPU
memory, and from a Valkey that another process has filled), and the connectors of
:mod:`benchmarks.peers` (cold, and again: ``hit``, if it is one). Who goes first changes from round
to round. Before each hit vLLM's own prefix cache is emptied, and before each Redis hit the CPU tier
too. ``cached_tokens`` proves what a hit really was. ``vllm_cold_same_process`` is our engine with
its connector taken out for a moment: two processes differ by a few per cent whatever they run, so
what the connector costs a cold prompt is measured in one, and against vLLM alone beside it.

Ratios are medians of the rounds' ratios. What a peer cannot do here is reported under
``unavailable``.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.harness import spread
from benchmarks.models import MODELS
from benchmarks.peers import (
    TRANSFERS,
    PeerError,
    let_numba_come_early,
    lmcache_server,
    reason,
)
from benchmarks.served import (
    come_to_rest,
    empty_cpu_tier,
    probe_link,
    random_prompt,
    ttft_and_cached,
    without_connector,
)
from benchmarks.warm_server import warm_valkey
from tests.support.instance import InstanceError, VllmInstance
from tests.support.probe import EngineProbe
from tests.support.servers import Server
from tests.support.tiny_model import build_tiny_model

TOKENS = (1000, 4000, 16000)
HITS_PER_ROUND = 3
_NONE, _OURS, _MP = "vllm", "ours", "lmcache_mp"
_SLOW = "lmcache_v1"  # each of its requests waits seconds for a timeout: one round, one hit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="prompt lengths")
    parser.add_argument("--rounds", type=int, default=9, help="of the shortest; others less")
    parser.add_argument("--chunk-size", type=int, default=128, help="of this connector, in tokens")
    parser.add_argument("--no-peers", action="store_true", help="leave LMCache's own out")


@dataclass
class Case:
    """All times of one model and length. ``seconds[way][round]``: medians of that round."""

    model: str
    tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    def add(self, way: str, served: Sequence[tuple[float, int]]) -> None:
        """``served``: seconds and cached tokens of requests of one round."""
        seconds = statistics.median(taken for taken, _ in served)
        self.seconds.setdefault(way, []).append(seconds)
        fewest = min(cached for _, cached in served)
        self.cached[way] = min(fewest, self.cached.get(way, fewest))

    def ratios(self, way: str, reference: str) -> list[float]:
        """Of the rounds in which both were measured."""
        pairs = zip(self.seconds.get(way, ()), self.seconds.get(reference, ()), strict=False)
        return [ours / theirs for ours, theirs in pairs]


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    cases: list[Case] = []
    unavailable: dict[str, str] = {}
    for model in args.models:
        rounds = {tokens: _rounds(args.rounds, tokens) for tokens in sorted(args.tokens)}
        with tempfile.TemporaryDirectory(prefix="lmcache-connector-ttft-") as folder:
            bench = _Bench(model, Path(folder), rounds, args, unavailable, progress)
            cases += bench.run()
    return {
        **headline(cases),
        "chunk_size": args.chunk_size,
        "unavailable": unavailable,
        "cases": [fields for case in cases for fields in _case_fields(case)],
    }


def headline(cases: Sequence[Case]) -> dict[str, Any]:
    """One ratio per promise: the median over all rounds, and the worst case's own median."""
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
            fields[name] = round(statistics.median(chain.from_iterable(ratios)), 3)
            fields[f"{name}_worst_case"] = round(worst(map(statistics.median, ratios)), 3)
    return fields


def draw(result: dict[str, Any], target: Path) -> None:
    """Time to first token over prompt length, one line per way, one panel per model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(case["model"] for case in result["cases"]))
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(5.5 * len(models), 4.5), squeeze=False
    )
    for axes, model in zip(panels[0], models, strict=True):
        for way in dict.fromkeys(case["way"] for case in result["cases"]):
            points = [
                (case["tokens"], case["ttft_s"]["median"])
                for case in result["cases"]
                if (case["model"], case["way"]) == (model, way)
            ]
            if points:
                style = "--" if way.endswith("cold") else "-"
                axes.plot(*zip(*points, strict=True), style, marker="o", label=way)
        axes.set(xscale="log", yscale="log", title=model)
        axes.set(xlabel="prompt tokens", ylabel="time to first token, s")
    panels[0][-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(target, dpi=90, bbox_inches="tight")
    pyplot.close(figure)


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


class _Bench:
    """All contestants with one model. ``rounds``: by prompt length."""

    def __init__(
        self,
        model: str,
        folder: Path,
        rounds: dict[int, int],
        args: argparse.Namespace,
        unavailable: dict[str, str],
        progress: Progress,
    ) -> None:
        self._model = model
        self._folder = folder
        self._rounds = rounds
        self._peers = not args.no_peers
        self._chunk_size = args.chunk_size
        self._unavailable = unavailable
        self._engines: dict[str, VllmInstance] = {}
        self._progress = progress
        self._task = progress.add_task(model, total=sum(rounds.values()))
        self._path = build_tiny_model(folder / "model", MODELS[model])

    def run(self) -> list[Case]:
        cases = []
        with contextlib.ExitStack() as stack:
            valkey = stack.enter_context(warm_valkey(3072))
            self._fill(valkey)
            self._start(stack, _NONE, None)
            self._start(stack, _OURS, self._transfer(valkey))
            if self._peers:
                self._start_peers(stack)
            self._warm_up()
            for tokens, rounds in self._rounds.items():
                case = Case(self._model, tokens)
                for number in range(rounds):
                    self._round(case, number)
                    self._progress.advance(self._task)
                cases.append(case)
        return cases

    # -- engines ---------------------------------------------------------------------------------

    def _fill(self, valkey: Server) -> None:
        """Another process stores the prompts that shall be found in Redis, and leaves."""
        self._describe("another process fills Redis")
        with self._instance("writer", self._transfer(valkey)) as writer:
            for tokens, rounds in self._rounds.items():
                for number in range(rounds):
                    writer.call(ttft_and_cached, _written_prompt(tokens, number))
                    writer.call(come_to_rest)

    def _start_peers(self, stack: contextlib.ExitStack) -> None:
        try:
            gib = 1.5 * self._kv_bytes() / 2**30 + 1
            log = self._folder / "lmcache-server.log"
            transfer = stack.enter_context(lmcache_server(log, gib))
            self._start(stack, _MP, transfer)
        except PeerError as error:
            self._unavailable[_MP] = reason(error)
        for name, transfer in TRANSFERS.items():
            if name not in self._unavailable:
                self._start(stack, name, transfer)

    def _kv_bytes(self) -> int:
        """Of all prompts of all rounds."""
        tokens = sum(tokens * rounds for tokens, rounds in self._rounds.items())
        return tokens * MODELS[self._model].kv_bytes_per_token

    def _start(
        self, stack: contextlib.ExitStack, name: str, transfer: dict[str, Any] | None
    ) -> None:
        self._describe(f"{name} starts")
        instance = self._instance(name, transfer)
        try:
            self._engines[name] = stack.enter_context(instance)
        except InstanceError as error:
            instance.__exit__(InstanceError, error, None)  # what is left of it
            self._give_up(name, error)

    def _instance(self, name: str, transfer: dict[str, Any] | None) -> VllmInstance:
        longest = max(self._rounds)
        return VllmInstance(
            self._path,
            transfer,
            self._folder / f"{name}.log",
            let_numba_come_early if name == _MP else None,
            max_num_batched_tokens=8192,
            max_model_len=longest + 64,
            kv_cache_memory_bytes=max(256 << 20, self._prompt_bytes(longest) * 2),
        )

    def _transfer(self, valkey: Server) -> dict[str, Any]:
        extra = {"cpu_gib": 2.0, "redis_url": valkey.url, "chunk_size": self._chunk_size}
        return {
            "kv_connector": "LMCacheTieredConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def _prompt_bytes(self, tokens: int) -> int:
        return tokens * MODELS[self._model].kv_bytes_per_token

    def _give_up(self, name: str, error: InstanceError) -> None:
        """A peer that fails is left out from here on; vLLM alone and we may not fail."""
        if name in (_NONE, _OURS):
            raise error
        self._engines.pop(name, None)
        self._unavailable[name] = reason(error)

    def _warm_up(self) -> None:
        """Compilation, first touches, and what the connector learns of speeds."""
        for name in list(self._engines):
            self._describe(f"{name} warms up")
            with self._peer(name) as engine:
                for seed in range(1 if name == _SLOW else 3):
                    engine.call(ttft_and_cached, random_prompt(seed, 1000))
                    engine.call(come_to_rest)
        self._engines[_OURS].call(probe_link)

    # -- measurements ----------------------------------------------------------------------------

    def _round(self, case: Case, number: int) -> None:
        names = list(self._engines)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name == _SLOW and number > 0:
                continue
            self._describe(f"{case.tokens} tokens, {name}")
            with self._peer(name) as engine:
                prompt = random_prompt(1_000_000 + 1000 * case.tokens + number, case.tokens)
                if name == _NONE:
                    _measure_none(case, engine, prompt)
                elif name == _OURS:
                    _measure_ours(case, engine, prompt, number)
                else:
                    _measure_peer(case, name, engine, prompt)

    @contextlib.contextmanager
    def _peer(self, name: str) -> Iterator[VllmInstance]:
        try:
            yield self._engines[name]
        except InstanceError as error:
            self._give_up(name, error)

    def _describe(self, what: str) -> None:
        self._progress.update(self._task, description=f"{self._model}: {what}")


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
    """Without vLLM's own prefix cache, all writing done."""
    engine.call(come_to_rest)
    served: tuple[float, int] = engine.call(ttft_and_cached, prompt)
    return served


def _from_redis(probe: EngineProbe, prompt: list[int]) -> tuple[float, int]:
    empty_cpu_tier(probe)
    return ttft_and_cached(probe, prompt)


def _written_prompt(tokens: int, number: int) -> list[int]:
    return random_prompt(2_000_000 + 1000 * tokens + number, tokens)
