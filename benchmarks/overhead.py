"""What the connector costs when it brings nothing: misses, stores, decode steps, scheduler time.

Real engines of one model side by side: vLLM alone, with a connector that stores nowhere and finds
nothing (``kv_consumer`` on an empty Valkey: every prompt is hashed and looked up), and with one
that stores every prompt to the CPU tier and to Valkey (``kv_both``). They serve the same fresh
prompts in turn, the order changing from round to round; each figure is the median of the rounds'
ratios to vLLM alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.served import (
    come_to_rest,
    decode_step_microseconds,
    decode_tokens_per_second,
    lookup_microseconds,
    random_prompt,
    ttft_seconds,
)
from examples.instance import VllmInstance
from examples.tiny_model import DEMO_SHAPE, build_tiny_model
from tests.servers import running_server, valkey_binary

LOOKUP_TOKENS = 32_000
_NONE, _MISS, _COLD = "none", "kv_consumer", "kv_both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="prompts per figure, for medians")
    parser.add_argument("--tokens", type=int, default=6000, help="length of a prompt")
    parser.add_argument("--decode-requests", type=int, default=8, help="that decode together")
    parser.add_argument("--decode-tokens", type=int, default=128, help="each of them generates")
    parser.add_argument("--decode-rounds", type=int, default=5, help="for the median")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Ratios are to vLLM without a connector in the same round."""
    with _engines(args.tokens) as engines:
        for engine in engines.values():  # compilation, first touches, first figures
            for seed in range(2):
                engine.call(ttft_seconds, random_prompt(10_000 + seed, args.tokens))
        ttfts = _ttfts(engines, args, progress)
        speeds = _decode_speeds(engines, args, progress)
        both = engines[_COLD]
        prompts = [random_prompt(50_000 + i, 64) for i in range(args.decode_requests)]
        step = both.call(decode_step_microseconds, prompts, args.decode_tokens)
        lookup = both.call(lookup_microseconds, LOOKUP_TOKENS, 40)
        counters = both.counters()
    return {
        "rounds": args.rounds,
        "prompt_tokens": args.tokens,
        "ttft_none_s": round(statistics.median(ttfts[_NONE]), 4),
        "miss_ttft_vs_none": _ratio(ttfts[_MISS], ttfts[_NONE]),
        "cold_ttft_vs_none": _ratio(ttfts[_COLD], ttfts[_NONE]),
        "decode_none_tokens_per_s": round(statistics.median(speeds[_NONE]), 1),
        "decode_throughput_vs_none": _ratio(speeds[_COLD], speeds[_NONE]),
        "decode_step_scheduler_us_per_request": round(step, 2),
        "lookup_32k_tokens_us": round(lookup, 1),
        "store_jobs": counters["store_jobs"],
    }


@contextlib.contextmanager
def _engines(tokens: int) -> Iterator[dict[str, VllmInstance]]:
    """One instance per way to run, in this order."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = build_tiny_model(folder / "model", DEMO_SHAPE)
        valkey = stack.enter_context(running_server(valkey_binary() or "valkey-server"))
        namespaces = {_MISS: "never-written", _COLD: "written"}
        engines = {}
        for name in (_NONE, _MISS, _COLD):
            transfer = None
            if name in namespaces:
                extra = {"cpu_gib": 2.0, "redis_url": valkey.url, "namespace": namespaces[name]}
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
                    max_num_batched_tokens=max(8192, tokens),
                )
            )
        yield engines


def _ttfts(
    engines: dict[str, VllmInstance], args: argparse.Namespace, progress: Progress
) -> dict[str, list[float]]:
    def measure(engine: VllmInstance, seed: int) -> float:
        taken: float = engine.call(ttft_seconds, random_prompt(seed, args.tokens))
        return taken

    return _alternate(engines, measure, args.rounds, progress, "time to first token")


def _decode_speeds(
    engines: dict[str, VllmInstance], args: argparse.Namespace, progress: Progress
) -> dict[str, list[float]]:
    """Also through the chunks that fill with generated tokens, and are stored."""

    def measure(engine: VllmInstance, seed: int) -> float:
        prompts = [random_prompt(1000 * seed + i, 200) for i in range(args.decode_requests)]
        speed: float = engine.call(decode_tokens_per_second, prompts, args.decode_tokens)
        return speed

    chosen = {name: engines[name] for name in (_NONE, _COLD)}
    return _alternate(chosen, measure, args.decode_rounds, progress, "decode throughput")


def _alternate(
    engines: dict[str, VllmInstance],
    measure: Callable[[VllmInstance, int], float],
    rounds: int,
    progress: Progress,
    description: str,
) -> dict[str, list[float]]:
    """One figure per engine and round; who goes first changes, so that drift hits all alike."""
    figures: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for seed in progress.track(range(1, rounds + 1), description=description):
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            figures[name].append(measure(engines[name], seed))
            engines[name].call(come_to_rest)
    return figures


def _ratio(figures: list[float], reference: list[float]) -> float:
    pairs = zip(figures, reference, strict=True)
    return round(statistics.median(ours / theirs for ours, theirs in pairs), 4)
