"""Eight requests on one shared prefix that arrive together: is the last one delayed by the others?

Two engines of one model run side by side: vLLM alone, and with the connector on a warm Valkey.
Two processes differ by a few per cent whatever they run, so the second engine also runs with its
connector taken out for a moment. In each round all serve the same requests, in changing order: once
when the prefix is new, and again after vLLM's own prefix cache was reset, when only the connector
has it. Times are from the common arrival to the end of the last request. Ratios are medians of the
rounds' ratios, to the same process without its connector (``..._vs_none``) and to vLLM alone
(``..._vs_other_process``).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from rich.progress import Progress

from benchmarks.harness.engine_timings import seconds_for_all, without_connector
from benchmarks.harness.engines import Engines, Way
from benchmarks.harness.ratios import median, median_ratio
from benchmarks.harness.servers import warm_valkey
from tests.support.engines.instance import VllmInstance
from tests.support.engines.settings import random_prompt, tiered_transfer

_ALONE, _OURS = "alone", "ours"
_WAYS = (Way(_ALONE), Way(_OURS, without_connector), Way(_OURS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="for medians")
    parser.add_argument("--requests", type=int, default=8, help="that arrive together")
    parser.add_argument("--prefix-tokens", type=int, default=3000, help="that they share")
    parser.add_argument("--own-tokens", type=int, default=100, help="of each one's own")
    parser.add_argument("--max-tokens", type=int, default=16, help="that each generates")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    new: dict[Way, list[float]] = {way: [] for way in _WAYS}
    again: dict[Way, list[float]] = {way: [] for way in _WAYS}
    with _engines() as engines:
        for engine in engines.values():
            engine.call(seconds_for_all, [random_prompt(1, args.prefix_tokens)], 2)
        for number in progress.track(range(args.rounds), description="rounds"):
            prefix = random_prompt(100 + number, args.prefix_tokens)
            own = [random_prompt(1000 * number + i, args.own_tokens) for i in range(args.requests)]
            prompts = [prefix + tail for tail in own]
            for seconds in (new, again):
                for way in _WAYS if number % 2 else reversed(_WAYS):
                    taken = way.measure(engines, seconds_for_all, prompts, args.max_tokens)
                    seconds[way].append(taken)
        counts = engines[_OURS].counts()
    alone, out, connected = _WAYS
    return {
        "rounds": args.rounds,
        "requests": args.requests,
        "prefix_tokens": args.prefix_tokens,
        "new_none_s": median(new[out]),
        "new_vs_none": median_ratio(new[connected], new[out], 3),
        "again_vs_none": median_ratio(again[connected], again[out], 3),
        "new_vs_other_process": median_ratio(new[connected], new[alone], 3),
        "again_vs_other_process": median_ratio(again[connected], again[alone], 3),
        "hit_tokens": int(counts.total("hit_tokens")),
    }


@contextlib.contextmanager
def _engines() -> Iterator[dict[str, VllmInstance]]:
    """vLLM alone, and with the connector."""
    with warm_valkey() as valkey, Engines() as engines:
        transfer = tiered_transfer(cpu_gib=2.0, redis_url=valkey.url)
        yield {
            _ALONE: engines.start(_ALONE, max_num_seqs=8),
            _OURS: engines.start(_OURS, transfer, max_num_seqs=8),
        }
