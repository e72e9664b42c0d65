"""The connector's cost without hits: misses, stores, decode steps, scheduler time.

Three real engines of one model run side by side: vLLM alone, one with a connector that stores
nothing and has no hits (``kv_consumer``, no chunks in Valkey: each prompt is hashed and looked up),
and one that stores every prompt to the CPU tier and to Valkey (``kv_both``). They serve fresh
prompts in turn, and then in the opposite order.

Engines of the same configuration differ by more than the cost in question: each process has its own
speed, decided at its start. So each engine with a connector is also compared with itself: its
connector is taken out of the running engine (the scheduler's, and the worker's that every layer
calls) and put back. Beside the storing engine, an idle engine on this host shares with it, as by
default: it answers each lookup, with no hits. ``..._vs_none`` is with the connector over without
it, in the same process; ``..._vs_other_process`` is over vLLM alone; ``..._vs_empty`` is over a
connector that does nothing, in the same process: vLLM's own calls for any connector do not count in
it. All engines are started ``--launches`` times. Each ratio is the median over all rounds; the
quartiles are in ``ratios``.

``decode_step_cost_us`` is the loss of throughput as time: it grows with layers and stored bytes,
not with a step's compute. ``decode_throughput_beside_hits``: throughput of requests that decode
beside hits from memory, over that beside vLLM's own hits of the same prompts.
``quiet_step_cost_us`` compares median steps: most plan nothing, and no store runs beside them. Both
have a variant ``..._vs_empty``. ``audit_s``: the delay of an audited hit by its audit;
``audits_us_per_hit``: that delay per hit with the default share.
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
from typing import Any

from rich.progress import Progress

from benchmarks.harness.engine_timings import (
    audit_seconds,
    decode_beside_hits,
    decode_step_microseconds,
    decode_tokens_per_second,
    lookup_microseconds,
    median_decode_step_seconds,
    ttft_seconds,
    with_empty_connector,
    without_connector,
)
from benchmarks.harness.engines import MODELS, Engines, Way
from benchmarks.harness.ratios import in_turn, median, pairwise, spread
from benchmarks.harness.servers import warm_valkey
from tests.support.engines.instance import VllmInstance
from tests.support.engines.settings import random_prompt, tiered_transfer

LOOKUP_TOKENS = 32_000
AUDIT_SHARE = 0.001  # the default
_NONE, _MISS, _COLD = "none", "kv_consumer", "kv_both"
_WITHOUT = Way(_NONE)
_MISSING, _MISSING_OUT = Way(_MISS), Way(_MISS, without_connector)
_STORING, _STORING_OUT = Way(_COLD), Way(_COLD, without_connector)
_STORING_EMPTY = Way(_COLD, with_empty_connector)
_SUFFIXES = {
    "same process": "vs_none",
    "other process": "vs_other_process",
    "empty connector": "vs_empty",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--launches", type=int, default=3, help="starts of all engines")
    parser.add_argument("--rounds", type=int, default=4, help="there and back, per launch")
    parser.add_argument("--tokens", type=int, default=6000, help="length of a prompt")
    parser.add_argument("--decode-requests", type=int, default=8, help="that decode together")
    parser.add_argument("--decode-tokens", type=int, default=256, help="each of them generates")
    parser.add_argument("--decode-rounds", type=int, default=3, help="per launch")
    parser.add_argument("--hits", type=int, default=8, help="that come beside decoding requests")
    parser.add_argument("--hit-tokens", type=int, default=1500, help="length of each")
    parser.add_argument("--audit-rounds", type=int, default=8, help="per launch")
    parser.add_argument("--chunk-size", type=int, help="of the connector, in tokens")


@dataclass
class Contest:
    """One measurement per way and round. ``measure(call, seed)`` makes it with ``call(function,
    *args)``, which runs in the engine; ``rounds`` are per launch."""

    title: str
    ways: tuple[Way, ...]
    rounds: int
    measure: Callable[[Callable[..., Any], int], float]
    measured: dict[Way, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self, engines: dict[str, VllmInstance], progress: Progress, launch: str) -> None:
        """Each round measures all ways in order and in reverse, and takes the means: a process that
        follows another one finds its caches cold. Each round begins with another way."""
        for number in progress.track(range(self.rounds), description=f"{launch}: {self.title}"):
            order = in_turn(self.ways, number)
            there = self._measure_all(engines, order, 2 * number + 1)
            back = self._measure_all(engines, order[::-1], 2 * number + 2)
            for way in self.ways:
                self.measured[way].append(statistics.fmean((there[way], back[way])))

    def _measure_all(
        self, engines: dict[str, VllmInstance], order: Sequence[Way], seed: int
    ) -> dict[Way, float]:
        return {way: self.measure(partial(way.measure, engines), seed) for way in order}

    def ratios(self, way: Way, reference: Way) -> list[float]:
        return pairwise(self.measured[way], self.measured[reference])


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    ttfts, speeds, decode_steps = _contests(args)
    steps, lookups, audits, beside, store_jobs = [], [], [], [], 0
    for launch in range(args.launches):
        with _engines(args) as engines:
            for engine in engines.values():  # compilation, page faults
                for seed in range(2):
                    engine.call(ttft_seconds, random_prompt(10_000 + seed, args.tokens))
            for contest in (ttfts, speeds, decode_steps):
                contest.run(engines, progress, f"launch {launch + 1} of {args.launches}")
            both = engines[_COLD]
            prompts = [random_prompt(50_000 + i, 64) for i in range(args.decode_requests)]
            steps.append(both.call(decode_step_microseconds, prompts, args.decode_tokens))
            lookups.append(both.call(lookup_microseconds, LOOKUP_TOKENS, 40))
            beside += _beside_hits(args, both)
            audited = random_prompt(90_000, args.tokens)
            both.call(ttft_seconds, audited)
            audits += both.call(audit_seconds, audited, args.audit_rounds)
            store_jobs += int(both.counts().total("store_jobs"))
    ratios = _ratios(ttfts, speeds)
    return {
        "launches": args.launches,
        "rounds": len(ttfts.measured[_WITHOUT]),
        "decode_rounds": len(speeds.measured[_WITHOUT]),
        "audit_rounds": len(audits),
        "model": args.model,
        "prompt_tokens": args.tokens,
        **{f"{name}_{_SUFFIXES[against]}": median(r) for (name, against), r in ratios.items()},
        "decode_throughput_beside_hits": median(beside, 3),
        "decode_step_cost_us": _step_cost_us(speeds, _STORING_OUT, args.decode_requests),
        "decode_step_cost_us_vs_empty": _step_cost_us(speeds, _STORING_EMPTY, args.decode_requests),
        "quiet_step_cost_us": _longer_us(decode_steps, _STORING_OUT),
        "quiet_step_cost_us_vs_empty": _longer_us(decode_steps, _STORING_EMPTY),
        "decode_step_scheduler_us_per_request": median(steps, 2),
        "lookup_32k_tokens_us": median(lookups, 1),
        "audit_s": median(audits, 4),
        "audits_us_per_hit": round(1e6 * AUDIT_SHARE * statistics.median(audits)),
        "ttft_none_s": median(ttfts.measured[_WITHOUT]),
        "decode_none_tokens_per_s": median(speeds.measured[_WITHOUT], 1),
        "quiet_step_none_ms": round(1e3 * median(decode_steps.measured[_STORING_OUT], 6), 3),
        "store_jobs": store_jobs,
        "ratios": [
            {"figure": name, "against": against, **spread(r)}
            for (name, against), r in ratios.items()
        ],
    }


def _contests(args: argparse.Namespace) -> tuple[Contest, Contest, Contest]:
    """Times to first token, decode throughput, and median decode steps."""
    ttfts = Contest(
        "time to first token",
        (_WITHOUT, _MISSING_OUT, _MISSING, _STORING_OUT, _STORING),
        args.rounds,
        partial(_ttft, args.tokens),
    )
    speeds = Contest(
        "decode throughput",
        (_WITHOUT, _STORING_OUT, _STORING_EMPTY, _STORING),
        args.decode_rounds,
        partial(_decode, decode_tokens_per_second, args.decode_requests, args.decode_tokens),
    )
    steps = Contest(
        "decode steps",
        (_STORING_OUT, _STORING_EMPTY, _STORING),
        args.decode_rounds,
        partial(_decode, median_decode_step_seconds, args.decode_requests, args.decode_tokens),
    )
    return ttfts, speeds, steps


def _ratios(ttfts: Contest, speeds: Contest) -> dict[tuple[str, str], list[float]]:
    """The ratios of all rounds, by measure and by what it is compared with (``_SUFFIXES``)."""
    same, other, empty = _SUFFIXES
    return {
        ("miss_ttft", same): ttfts.ratios(_MISSING, _MISSING_OUT),
        ("cold_ttft", same): ttfts.ratios(_STORING, _STORING_OUT),
        ("decode_throughput", same): speeds.ratios(_STORING, _STORING_OUT),
        ("miss_ttft", other): ttfts.ratios(_MISSING, _WITHOUT),
        ("cold_ttft", other): ttfts.ratios(_STORING, _WITHOUT),
        ("decode_throughput", other): speeds.ratios(_STORING, _WITHOUT),
        ("decode_throughput", empty): speeds.ratios(_STORING, _STORING_EMPTY),
        ("empty_connector_throughput", same): speeds.ratios(_STORING_EMPTY, _STORING_OUT),
    }


def _beside_hits(args: argparse.Namespace, both: VllmInstance) -> list[float]:
    """Throughput beside hits from memory over that beside vLLM's own hits, per round."""
    hits = [random_prompt(70_000 + i, args.hit_tokens) for i in range(args.hits)]
    both.call(ttft_seconds, hits[0])  # the first hit of each kind is audited
    for hit in (*hits, *hits[:2]):
        both.call(ttft_seconds, hit)
    ratios = []
    for number in range(1 + 2 * args.decode_rounds):
        seen = {}
        for must_load in (True, False) if number % 2 else (False, True):
            seed, before = 60_000 + 1000 * number, both.counts().total("load_jobs")
            prompts = [random_prompt(seed + i, 200) for i in range(args.decode_requests)]
            work = prompts, args.decode_tokens, hits, must_load
            seen[must_load] = both.call(decode_beside_hits, *work)
            num_loads = both.counts().total("load_jobs") - before
            assert num_loads >= args.hits if must_load else num_loads == 0
        ratios.append(seen[True] / seen[False])
    return ratios[1:]  # the first round warms up


@contextlib.contextmanager
def _engines(args: argparse.Namespace) -> Iterator[dict[str, VllmInstance]]:
    """The measured engines by name; an idle neighbour runs beside them."""
    with (
        warm_valkey() as valkey,
        Engines(MODELS[args.model]) as engines,
        tempfile.TemporaryDirectory() as host_folder,
    ):
        token_bytes = MODELS[args.model].kv_bytes_per_token
        cpu_gib = max(2.0, (1 << 16) * token_bytes / 2**30)
        extra = {"cpu_gib": cpu_gib, "redis_url": valkey.url, "host_folder": host_folder}
        if args.chunk_size is not None:
            extra["chunk_size"] = args.chunk_size
        transfers = {
            _NONE: None,
            _MISS: tiered_transfer(_MISS, **extra, namespace="never-written"),
            _COLD: tiered_transfer(_COLD, **extra, namespace="written"),
        }
        sizes = {
            "max_num_batched_tokens": max(8192, args.tokens),
            "kv_cache_memory_bytes": max(1 << 30, (1 << 15) * token_bytes),
        }
        engines.start("neighbour", transfers[_COLD], **sizes)
        yield {name: engines.start(name, each, **sizes) for name, each in transfers.items()}


def _ttft(num_tokens: int, call: Callable[..., Any], seed: int) -> float:
    taken: float = call(ttft_seconds, random_prompt(seed, num_tokens))
    return taken


def _decode(
    measure: Callable[..., float],
    num_requests: int,
    num_tokens: int,
    call: Callable[..., Any],
    seed: int,
) -> float:
    """Long enough that generated tokens fill chunks, which are stored."""
    prompts = [random_prompt(1000 * seed + i, 200) for i in range(num_requests)]
    measured: float = call(measure, prompts, num_tokens)
    return measured


def _step_cost_us(speeds: Contest, reference: Way, num_requests: int) -> int:
    """The extra time of a decode step, with its share of all stores and writes."""
    pairs = zip(speeds.measured[_STORING], speeds.measured[reference], strict=True)
    us = (1e6 * num_requests * (1 / ours - 1 / theirs) for ours, theirs in pairs)
    return round(statistics.median(us))


def _longer_us(steps: Contest, reference: Way) -> int:
    pairs = zip(steps.measured[_STORING], steps.measured[reference], strict=True)
    return round(1e6 * statistics.median(ours - theirs for ours, theirs in pairs))
