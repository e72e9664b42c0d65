"""How costs grow with prompt length, cached chunks, concurrent requests and instances.

Some curves are of single parts of the connector, the others of a real engine. The engine's model
has two thin layers, so that prompts of 128,000 tokens and 256 requests fit a small machine. Every
hit is loaded (``compute_or_load: always``), so that loading is measured. ``exponent`` is the slope
of a line through the logarithms of all points: 1 for linear, 0 for constant; ``tail_exponent`` is
that of the last three points, where constant parts no longer hide it. ``bound`` is the largest
exponent allowed: 1 if the work must touch all that grows, else 0; 2 for cold prompts, because of
attention. A curve is ``within`` it if neither exponent exceeds it by more than ``SLACK``, the
effect of the machine's caches on a larger working set.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.growth_parts import (
    event_microseconds,
    fill_index,
    index_bytes,
    instances_on_one_prefix,
    lookup_round_trips,
    redis_bytes,
)
from benchmarks.harness.engine_timings import (
    come_to_rest,
    decode_step_microseconds,
    empty_cpu_tier,
    lookup_microseconds,
    seconds_for_all,
    ttft_and_cached,
)
from benchmarks.harness.engines import Engines
from benchmarks.harness.plots import panels
from benchmarks.harness.servers import running_valkey
from examples.tiny_model import ModelShape
from tests.support.engines.instance import VllmInstance
from tests.support.engines.settings import random_prompt, tiered_transfer
from tests.support.redis.servers import Server

SLACK = 0.3
_TAIL = 3
CHUNK_TOKENS = 256
LENGTHS = (1_000, 4_000, 16_000, 64_000, 128_000)
KEYS = (1_000, 10_000, 100_000, 1_000_000)
REQUESTS = (1, 4, 16, 64, 256)
INSTANCES = (1, 2, 4, 8)
CHUNKS = (4, 16, 64, 256, 500)
_VALKEY_MIB = 4096
_STUB = ModelShape(
    num_layers=2,
    hidden_size=128,
    intermediate_size=256,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position=131_072,
)
_REPEATS = 5
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """``y`` over ``x``; ``bound`` is the largest exponent it may have."""

    name: str
    x_name: str
    y_name: str
    bound: int
    points: Points

    @property
    def exponent(self) -> float:
        return _slope(self.points)

    @property
    def tail_exponent(self) -> float:
        return _slope(self.points[-_TAIL:])

    @property
    def within(self) -> bool:
        return max(self.exponent, self.tail_exponent) <= self.bound + SLACK

    def fields(self) -> dict[str, Any]:
        return {
            "curve": self.name,
            "grows_with": self.x_name,
            "what": self.y_name,
            "exponent": round(self.exponent, 3),
            "tail_exponent": round(self.tail_exponent, 3),
            "bound": self.bound,
            "within": self.within,
            "x": [x for x, _ in self.points],
            "y": [float(f"{y:.4g}") for _, y in self.points],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="prompt, in tokens")
    parser.add_argument("--no-engine", action="store_true", help="only what needs no vLLM engine")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    curves: list[Curve] = []
    with running_valkey(_VALKEY_MIB) as valkey:
        for measure in progress.track(_parts_alone(valkey), description="parts alone"):
            curves += measure()
    if not args.no_engine:
        lengths = [length for length in LENGTHS if length <= args.longest]
        with _engine() as engine:
            work = [
                lambda: _by_length(engine, lengths),
                lambda: _by_requests(engine),
                lambda: _by_index_size(engine),
            ]
            for measure in progress.track(work, description="a real engine"):
                curves += measure()
    return {
        "all_within": all(curve.within for curve in curves),
        "not_within": [curve.name for curve in curves if not curve.within],
        "curves": [curve.fields() for curve in curves],
    }


def draw(result: dict[str, Any], target: Path) -> None:
    """All curves in small panels with logarithmic axes, the exponents in the titles."""
    curves = result["curves"]
    columns = 4
    rows = -(-len(curves) // columns)
    with panels(target, rows, columns, (13, 2.7 * rows), dpi=60) as all_axes:
        for axes in all_axes[len(curves) :]:
            axes.axis("off")
        for axes, curve in zip(all_axes, curves, strict=False):
            color = "tab:blue" if curve["within"] else "tab:red"
            axes.plot(curve["x"], curve["y"], marker="o", color=color)
            axes.set(xscale="log", yscale="log", xlabel=curve["grows_with"], ylabel=curve["what"])
            exponents = f"{curve['exponent']:.2f}, {curve['tail_exponent']:.2f} at the end"
            axes.set_title(f"{curve['curve']}\n{exponents}", fontsize="small")
            if max(curve["y"]) < 3 * min(curve["y"]):  # flat lines shall look flat
                axes.set_ylim(min(curve["y"]) / 10, max(curve["y"]) * 10)
        all_axes[0].figure.tight_layout()


# -- parts without an engine ---------------------------------------------------------------------


def _parts_alone(valkey: Server) -> tuple[Callable[[], list[Curve]], ...]:
    def index() -> list[Curve]:
        return [
            Curve("index size", "cached chunks", "bytes", 1, _points(KEYS, index_bytes)),
            Curve(
                "index update",
                "cached chunks",
                "µs per event",
                0,
                _points(KEYS, event_microseconds),
            ),
        ]

    def round_trips() -> list[Curve]:
        trips = _points(CHUNKS, lambda chunks: lookup_round_trips(valkey, chunks))
        return [Curve("Redis look-up", "chunks asked for", "round trips", 0, trips)]

    def memory() -> list[Curve]:
        each = _points(CHUNKS, lambda chunks: redis_bytes(valkey, chunks) / chunks / CHUNK_TOKENS)
        return [Curve("Redis memory", "cached chunks", "bytes per cached token", 0, each)]

    def instances() -> list[Curve]:
        found = {number: instances_on_one_prefix(valkey, number) for number in INSTANCES}

        def curve(name: str, what: str, bound: int, field: str) -> Curve:
            points = _points(INSTANCES, lambda number: getattr(found[number], field))
            return Curve(name, "instances", what, bound, points)

        return [
            curve("Redis memory, shared prefix", "bytes", 0, "redis_bytes"),
            # Instances that compute a chunk at the same moment may all write it.
            curve("writing, shared prefix", "bytes sent to Redis, all together", 1, "sent_bytes"),
            curve("Redis look-up, shared prefix", "commands per instance", 0, "lookup_commands"),
            curve("reading, shared prefix", "seconds, all together", 1, "read_seconds"),
        ]

    return index, round_trips, memory, instances


def _points(sizes: Iterable[int], measure: Callable[[int], float]) -> Points:
    return tuple((float(size), float(measure(size))) for size in sizes)


# -- a real engine -------------------------------------------------------------------------------


@contextlib.contextmanager
def _engine() -> Iterator[VllmInstance]:
    with running_valkey(_VALKEY_MIB) as valkey, Engines(_STUB) as engines:
        room = 1.1 * _STUB.max_position * _STUB.kv_bytes_per_token
        yield engines.start(
            "engine",
            tiered_transfer(cpu_gib=1.0, redis_url=valkey.url, compute_or_load="always"),
            max_model_len=_STUB.max_position,
            max_num_batched_tokens=8192,
            max_num_seqs=max(REQUESTS),
            kv_cache_memory_bytes=int(room),
        )


def _by_length(engine: VllmInstance, lengths: Sequence[int]) -> list[Curve]:
    for _ in range(2):  # warm-up, hits included
        engine.call(ttft_and_cached, random_prompt(1, 2000))
        engine.call(come_to_rest)
    seconds: dict[str, list[tuple[float, float]]] = {}
    lookups = []
    for length in lengths:
        for way, taken in _ttfts(engine, length).items():
            seconds.setdefault(way, []).append((float(length), taken))
        lookups.append((float(length), engine.call(lookup_microseconds, length, 20)))
    bounds = {"cold": 2}  # vLLM's attention
    return [
        Curve(f"TTFT, {way}", "prompt tokens", "seconds", bounds.get(way, 1), tuple(points))
        for way, points in seconds.items()
    ] + [Curve("look-up", "prompt tokens", "µs of the scheduler", 1, tuple(lookups))]


def _ttfts(engine: VllmInstance, length: int) -> dict[str, float]:
    """Median seconds of each way to serve a prompt. Raises ``RuntimeError`` if a hit is a miss."""
    prompt = random_prompt(length, length)
    cold, _ = engine.call(ttft_and_cached, prompt)
    seconds = {"cold": float(cold)}
    for way, prepare in (("CPU hit", come_to_rest), ("Redis hit", empty_cpu_tier)):
        hits = []
        for _ in range(_REPEATS):
            engine.call(come_to_rest)
            engine.call(prepare)
            hits.append(engine.call(ttft_and_cached, prompt))
        if min(cached for _, cached in hits) < length - 2 * CHUNK_TOKENS:
            raise RuntimeError(f"not the hits expected: {hits}")
        seconds[way] = float(np.median([taken for taken, _ in hits]))
    own = [engine.call(ttft_and_cached, prompt)[0] for _ in range(_REPEATS)]
    seconds["vLLM's own hit"] = float(np.median(own))
    engine.call(come_to_rest)
    return seconds


def _by_requests(engine: VllmInstance) -> list[Curve]:
    """Concurrent requests: the time of their hits, and the cost of each in a decode step."""
    hits, steps = [], []
    for number in REQUESTS:
        prompts = [random_prompt(10_000 * number + i, 300) for i in range(number)]
        engine.call(seconds_for_all, prompts, 1)
        engine.call(come_to_rest)
        before = engine.counts().total("hit_tokens", "cpu")
        hits.append((float(number), engine.call(seconds_for_all, prompts, 1)))
        found = engine.counts().total("hit_tokens", "cpu") - before
        if found != number * CHUNK_TOKENS:
            raise RuntimeError(f"{found} tokens of {number} requests were hits")
        engine.call(come_to_rest)
        prompts = [random_prompt(20_000 * number + i, 64) for i in range(number)]
        steps.append((float(number), engine.call(decode_step_microseconds, prompts, 32)))
    return [
        Curve("hits at once", "requests", "seconds until all are served", 1, tuple(hits)),
        Curve("decode step", "requests", "scheduler µs per request", 0, tuple(steps)),
    ]


def _by_index_size(engine: VllmInstance) -> list[Curve]:
    """A lookup of one prompt in a growing index."""

    def microseconds(keys: int) -> float:
        engine.call(fill_index, keys)
        return float(engine.call(lookup_microseconds, 16_000, 20))

    what = "µs, 16,000 tokens"
    return [Curve("look-up, large index", "cached chunks", what, 0, _points(KEYS, microseconds))]


def _slope(points: Points) -> float:
    """Least squares through the logarithms."""
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])
