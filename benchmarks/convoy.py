"""Eight requests on one shared prefix that arrive together: does anyone wait in a convoy?

Two engines of one model side by side, vLLM alone and with the connector on an empty Valkey. Each
round both serve the same requests, in turns who goes first: once as nobody has seen the prefix, and
once more after vLLM's own prefix cache was emptied, when only the connector still has it. Times are
from the arrival of all to the end of the last; figures are medians of the rounds' ratios to vLLM
alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.served import random_prompt
from examples.instance import VllmInstance
from examples.probe import EngineProbe
from examples.tiny_model import DEMO_SHAPE, build_tiny_model
from tests.servers import running_server, valkey_binary

_NONE, _BOTH = "none", "connector"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="for medians")
    parser.add_argument("--requests", type=int, default=8, help="that arrive together")
    parser.add_argument("--prefix-tokens", type=int, default=3000, help="that they share")
    parser.add_argument("--own-tokens", type=int, default=100, help="of each one's own")
    parser.add_argument("--max-tokens", type=int, default=16, help="that each generates")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    new: dict[str, list[float]] = {_NONE: [], _BOTH: []}
    again: dict[str, list[float]] = {_NONE: [], _BOTH: []}
    with _engines() as engines:
        for engine in engines.values():
            engine.call(seconds_for_all, [random_prompt(1, args.prefix_tokens)], 2)
        task = progress.add_task("rounds", total=args.rounds)
        for number in range(args.rounds):
            prefix = random_prompt(100 + number, args.prefix_tokens)
            own = [random_prompt(1000 * number + i, args.own_tokens) for i in range(args.requests)]
            prompts = [prefix + tail for tail in own]
            for times in (new, again):
                names = sorted(engines, reverse=number % 2 == 0)
                for name in names:
                    taken = engines[name].call(seconds_for_all, prompts, args.max_tokens)
                    times[name].append(taken)
                    engines[name].reset_prefix_cache()
            progress.advance(task)
        counters = engines[_BOTH].counters()
    return {
        "rounds": args.rounds,
        "requests": args.requests,
        "prefix_tokens": args.prefix_tokens,
        "new_none_s": round(statistics.median(new[_NONE]), 4),
        "new_vs_none": _ratio(new),
        "again_vs_none": _ratio(again),
        "hit_tokens": counters["local_hit_tokens"] + counters["remote_hit_tokens"],
    }


def seconds_for_all(probe: EngineProbe, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    """Until the last has its last token; then come to rest."""
    started = time.perf_counter()
    for prompt in prompts:
        probe.add(prompt, max_tokens)
    while probe.engine.has_unfinished_requests():
        probe.engine.step()
    taken = time.perf_counter() - started
    probe.drain()
    return taken


@contextlib.contextmanager
def _engines() -> Iterator[dict[str, VllmInstance]]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = build_tiny_model(folder / "model", DEMO_SHAPE)
        valkey = stack.enter_context(running_server(valkey_binary() or "valkey-server"))
        transfer = {
            "kv_connector": "LMCacheTieredConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_gib": 2.0, "redis_url": valkey.url},
        }
        yield {
            name: stack.enter_context(
                VllmInstance(model, kv_transfer, folder / f"{name}.log", max_num_seqs=8)
            )
            for name, kv_transfer in ((_NONE, None), (_BOTH, transfer))
        }


def _ratio(times: dict[str, list[float]]) -> float:
    ratios = (b / a for a, b in zip(times[_NONE], times[_BOTH], strict=True))
    return round(statistics.median(ratios), 3)
