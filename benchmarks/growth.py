"""How costs grow: with prompt length, cached chunks, concurrent requests and instances.

Each curve is measured on real parts, a real engine where an engine is what grows. The engine's
model is a stub, two thin layers, so that prompts of 128,000 tokens and 256 requests fit a small
machine; every hit is loaded (``compute_or_load: always``), so that it is the loading that is
measured. ``exponent`` is the slope of a line through the logarithms of all points, 1 for linear and
0 for constant; ``tail_exponent`` that of the last three, where constant parts no longer hide it.
``bound`` is what a curve may grow with at most: what it must touch (1), or nothing (0); a curve is
``within`` it when neither is larger by more than ``SLACK``, which is what a machine's own caches
make of a larger working set.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.convoy import seconds_for_all
from benchmarks.growth_parts import (
    event_microseconds,
    fill_index,
    index_bytes,
    instances_on_one_prefix,
    lookup_round_trips,
    redis_bytes,
)
from benchmarks.served import (
    come_to_rest,
    decode_step_microseconds,
    empty_cpu_tier,
    lookup_microseconds,
    random_prompt,
    ttft_and_cached,
)
from tests.support.instance import VllmInstance
from tests.support.servers import Server, running_server, valkey_binary
from tests.support.tiny_model import ModelShape, build_tiny_model

SLACK = 0.3
_TAIL = 3
CHUNK_TOKENS = 256
LENGTHS = (1_000, 4_000, 16_000, 64_000, 128_000)
KEYS = (1_000, 10_000, 100_000, 1_000_000)
REQUESTS = (1, 4, 16, 64, 256)
INSTANCES = (1, 2, 4, 8)
CHUNKS = (4, 16, 64, 256, 500)
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


@dataclass(frozen=True)
class Curve:
    """``y`` over ``x``; ``bound`` is the largest exponent it may have."""

    name: str
    x_name: str
    y_name: str
    bound: int
    points: tuple[tuple[float, float], ...]

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
    with _valkey() as valkey:
        parts = list(_parts_alone(valkey))
        for measure in progress.track(parts, description="parts alone"):
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
    """All curves in small panels, both axes logarithmic, the exponent in the title."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    curves = result["curves"]
    columns = 4
    rows = -(-len(curves) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(13, 2.7 * rows), squeeze=False)
    for axes in panels.flat[len(curves) :]:
        axes.axis("off")
    for axes, curve in zip(panels.flat, curves, strict=False):
        color = "tab:blue" if curve["within"] else "tab:red"
        axes.plot(curve["x"], curve["y"], marker="o", color=color)
        axes.set(xscale="log", yscale="log", xlabel=curve["grows_with"], ylabel=curve["what"])
        exponents = f"{curve['exponent']:.2f}, {curve['tail_exponent']:.2f} at the end"
        axes.set_title(f"{curve['curve']}\n{exponents}", fontsize="small")
        if max(curve["y"]) < 3 * min(curve["y"]):  # a flat line shall look flat
            axes.set_ylim(min(curve["y"]) / 10, max(curve["y"]) * 10)
    figure.tight_layout()
    figure.savefig(target, dpi=60)
    pyplot.close(figure)


def _valkey() -> contextlib.AbstractContextManager[Server]:
    settings = {"maxmemory": "4gb", "maxmemory-policy": "allkeys-lru"}
    return running_server(valkey_binary() or "valkey-server", settings)


# -- parts without an engine ---------------------------------------------------------------------


def _parts_alone(valkey: Server) -> Iterator[Callable[[], list[Curve]]]:
    def index() -> list[Curve]:
        sizes = [(float(keys), index_bytes(keys)) for keys in KEYS]
        events = [(float(keys), event_microseconds(keys)) for keys in KEYS]
        return [
            Curve("index size", "cached chunks", "bytes", 1, tuple(sizes)),
            Curve("index update", "cached chunks", "µs per event", 0, tuple(events)),
        ]

    def round_trips() -> list[Curve]:
        trips = [(float(chunks), lookup_round_trips(valkey, chunks)) for chunks in CHUNKS]
        return [Curve("Redis look-up", "chunks asked for", "round trips", 0, tuple(trips))]

    def memory() -> list[Curve]:
        stored = [(chunks, redis_bytes(valkey, chunks)) for chunks in CHUNKS]
        each = [(float(chunks), used / chunks / CHUNK_TOKENS) for chunks, used in stored]
        name = "bytes per cached token"
        return [Curve("Redis memory", "cached chunks", name, 0, tuple(each))]

    def instances() -> list[Curve]:
        found = [(float(n), instances_on_one_prefix(valkey, n)) for n in INSTANCES]
        return [
            Curve(name, "instances", what, 0, tuple((n, getattr(one, field)) for n, one in found))
            for name, what, field in (
                ("Redis memory, shared prefix", "bytes", "redis_bytes"),
                ("writing, shared prefix", "bytes sent to Redis, all together", "sent_bytes"),
                ("Redis look-up, shared prefix", "commands per instance", "lookup_commands"),
            )
        ] + [
            Curve(
                "reading, shared prefix",
                "instances",
                "seconds, all together",
                1,
                tuple((n, one.read_seconds) for n, one in found),
            )
        ]

    yield from (index, round_trips, memory, instances)


# -- a real engine -------------------------------------------------------------------------------


@contextlib.contextmanager
def _engine() -> Iterator[VllmInstance]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = build_tiny_model(folder / "model", _STUB)
        valkey = stack.enter_context(_valkey())
        extra = {"cpu_gib": 1.0, "redis_url": valkey.url, "compute_or_load": "always"}
        transfer = {
            "kv_connector": "LMCacheTieredConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        room = 1.1 * _STUB.max_position * _STUB.kv_bytes_per_token
        yield stack.enter_context(
            VllmInstance(
                model,
                transfer,
                folder / "engine.log",
                max_model_len=_STUB.max_position,
                max_num_batched_tokens=8192,
                max_num_seqs=max(REQUESTS),
                kv_cache_memory_bytes=int(room),
            )
        )


def _by_length(engine: VllmInstance, lengths: Sequence[int]) -> list[Curve]:
    ways: dict[str, list[tuple[float, float]]] = {}
    for _ in range(2):  # warm up, hits too
        engine.call(ttft_and_cached, random_prompt(1, 2000))
        engine.call(come_to_rest)
    for length in lengths:
        prompt = random_prompt(length, length)
        cold, _ = engine.call(ttft_and_cached, prompt)
        _add(ways, "cold", length, [cold])
        for way, prepare in (("CPU hit", come_to_rest), ("Redis hit", empty_cpu_tier)):
            hits = []
            for _ in range(_REPEATS):
                engine.call(come_to_rest)
                engine.call(prepare)
                hits.append(engine.call(ttft_and_cached, prompt))
            _add(ways, way, length, _seconds(hits, at_least=length - 2 * CHUNK_TOKENS))
        hits = [engine.call(ttft_and_cached, prompt) for _ in range(_REPEATS)]
        _add(ways, "vLLM's own hit", length, _seconds(hits))
        engine.call(come_to_rest)
        lookup = engine.call(lookup_microseconds, length, 20)
        _add(ways, "look-up", length, [lookup])
    lookup_points = ways.pop("look-up")
    bounds = {"cold": 2}  # attention, vLLM's own affair
    return [
        Curve(f"TTFT, {way}", "prompt tokens", "seconds", bounds.get(way, 1), tuple(points))
        for way, points in ways.items()
    ] + [Curve("look-up", "prompt tokens", "µs of the scheduler", 1, tuple(lookup_points))]


def _by_requests(engine: VllmInstance) -> list[Curve]:
    """Requests at once: their hits, and what each costs in a decode step."""
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
    """A look-up of one prompt, the index growing around it."""
    points = []
    for keys in KEYS:
        engine.call(fill_index, keys)
        points.append((float(keys), engine.call(lookup_microseconds, 16_000, 20)))
    return [Curve("look-up, large index", "cached chunks", "µs, 16,000 tokens", 0, tuple(points))]


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares through the logarithms."""
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])


def _add(
    ways: dict[str, list[tuple[float, float]]], way: str, x: float, ys: Sequence[float]
) -> None:
    ways.setdefault(way, []).append((float(x), float(np.median(ys))))


def _seconds(served: Sequence[tuple[float, int]], at_least: int = 0) -> list[float]:
    """Raises ``RuntimeError`` when something was computed that should have been a hit."""
    if min(cached for _, cached in served) < at_least:
        raise RuntimeError(f"not the hits expected: {served}")
    return [seconds for seconds, _ in served]
