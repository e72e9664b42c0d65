"""Eight requests on one shared prefix that arrive together: does anyone wait in a convoy?

Two engines of one model side by side, vLLM alone and with the connector on an empty Valkey; and the
second once more with its connector taken out for a moment, because two processes differ by a few
per cent whatever they run. Each round all serve the same requests, in turns who goes first: once as
nobody has seen the prefix, and once more after vLLM's own prefix cache was emptied, when only the
connector still has it. Times are from the arrival of all to the end of the last; figures are
medians of the rounds' ratios to the same process without its connector (``..._vs_none``), and to
the one that never had one (``..._vs_other_process``).
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

from benchmarks.served import come_to_rest, random_prompt, without_connector
from benchmarks.warm_server import warm_valkey
from tests.support.instance import VllmInstance
from tests.support.probe import EngineProbe
from tests.support.tiny_model import DEMO_SHAPE, build_tiny_model

_ALONE, _OUT, _IN = "alone", "connector out", "connector in"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="for medians")
    parser.add_argument("--requests", type=int, default=8, help="that arrive together")
    parser.add_argument("--prefix-tokens", type=int, default=3000, help="that they share")
    parser.add_argument("--own-tokens", type=int, default=100, help="of each one's own")
    parser.add_argument("--max-tokens", type=int, default=16, help="that each generates")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    ways = (_ALONE, _OUT, _IN)
    new: dict[str, list[float]] = {way: [] for way in ways}
    again: dict[str, list[float]] = {way: [] for way in ways}
    with _engines() as (alone, ours):
        for engine in (alone, ours):
            engine.call(seconds_for_all, [random_prompt(1, args.prefix_tokens)], 2)
        for number in progress.track(range(args.rounds), description="rounds"):
            prefix = random_prompt(100 + number, args.prefix_tokens)
            own = [random_prompt(1000 * number + i, args.own_tokens) for i in range(args.requests)]
            prompts = [prefix + tail for tail in own]
            for times in (new, again):
                for way in ways if number % 2 else reversed(ways):
                    times[way].append(_measure(way, alone, ours, prompts, args.max_tokens))
        counts = ours.counts()
    return {
        "rounds": args.rounds,
        "requests": args.requests,
        "prefix_tokens": args.prefix_tokens,
        "new_none_s": round(statistics.median(new[_OUT]), 4),
        "new_vs_none": _ratio(new, _OUT),
        "again_vs_none": _ratio(again, _OUT),
        "new_vs_other_process": _ratio(new, _ALONE),
        "again_vs_other_process": _ratio(again, _ALONE),
        "hit_tokens": int(counts.total("hit_tokens")),
    }


def _measure(
    way: str,
    alone: VllmInstance,
    ours: VllmInstance,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> float:
    engine = alone if way == _ALONE else ours
    work = (seconds_for_all, prompts, max_tokens)
    taken: float = engine.call(without_connector, *work) if way == _OUT else engine.call(*work)
    engine.call(come_to_rest)
    return taken


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
def _engines() -> Iterator[tuple[VllmInstance, VllmInstance]]:
    """vLLM alone, and with the connector."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = build_tiny_model(folder / "model", DEMO_SHAPE)
        valkey = stack.enter_context(warm_valkey())
        transfer = {
            "kv_connector": "LMCacheTieredConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_gib": 2.0, "redis_url": valkey.url},
        }
        alone = VllmInstance(model, None, folder / "alone.log", max_num_seqs=8)
        ours = VllmInstance(model, transfer, folder / "ours.log", max_num_seqs=8)
        yield stack.enter_context(alone), stack.enter_context(ours)


def _ratio(times: dict[str, list[float]], reference: str) -> float:
    ratios = (ours / theirs for theirs, ours in zip(times[reference], times[_IN], strict=True))
    return round(statistics.median(ratios), 3)
