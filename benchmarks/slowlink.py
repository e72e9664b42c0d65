"""Never slower than recompute: time to first token over a link of any speed, to a real Valkey.

An instance behind a throttling proxy serves prompts that another instance has stored, with its
connector and with it taken out for a moment, in turn: two processes differ by a few per cent
whatever they run. vLLM's prefix cache and the CPU tier are emptied before each, so that all loads
use the link. ``ttft_vs_recompute``: the median over a setting's rounds, once the instance has
measured the link. ``first_ttft_vs_recompute``: the first request after a change of the link, which
the instance cannot know yet.

``worst_ttft_vs_recompute`` is the largest of two dozen medians, so it mostly shows their scatter:
if pairs scatter by 10 %, fifteen rounds bring it to some 5 %.

With ``--codecs none blosc2`` every setting is measured for values of both kinds, which two
instances write and one instance reads. ``ttft_vs_first_codec``: the median over the rounds of one
kind's time over that of the first kind, a moment before. Compression depends on the model:
``--model`` takes a folder with a trained one.

The proxy is one Python process on the same machine: above a few hundred MB/s it is the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.harness.engine_timings import (
    come_to_rest,
    empty_cpu_tier,
    probe_link,
    ttft_seconds,
    without_connector,
)
from benchmarks.harness.engines import Engines
from benchmarks.harness.plots import panels
from benchmarks.harness.ratios import median, median_ratio
from benchmarks.harness.servers import warm_valkey
from tests.support.engines.calls import chunk_keys
from tests.support.engines.instance import InstanceError, VllmInstance
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import random_prompt, tiered_transfer
from tests.support.redis.servers import Server, value_names
from tests.support.redis.slow_proxy import SlowLink, proxy_process

MB_PER_S = (1, 3, 10, 30, 100, 300, 1000)
LATENCIES_MS = (0, 20, 200)
_CHUNK_TOKENS = 128  # the default


@dataclass(frozen=True)
class Setting:
    """One kind of link; silent without a bandwidth."""

    mb_per_s: float | None
    latency_ms: float

    def apply(self, link: SlowLink) -> None:
        if self.mb_per_s is None:
            link.set(stalled=True)
        else:
            link.set(self.mb_per_s * 1e6, self.latency_ms / 1000)


@dataclass(frozen=True)
class Measured:
    """Medians of one setting, for values of one kind."""

    codec: str
    mb_per_s: float | None
    latency_ms: float
    ttft_vs_recompute: float
    first_ttft_vs_recompute: float
    ttft_vs_first_codec: float
    ttft_s: float
    recompute_s: float
    loaded_tokens: int


def draw(result: dict[str, Any], target: Path) -> None:
    """Time to first token over the link's speed, a line per round trip."""
    rows = [row for row in result["settings"] if row.get("codec", "none") == "none"]
    with panels(target, 1, 1, (7, 3.8), dpi=110) as (axes,):
        recompute = statistics.median(1000 * row["recompute_s"] for row in rows)
        axes.axhline(recompute, color="black", linestyle="--", label="recomputed")
        for latency in sorted({row["latency_ms"] for row in rows}):
            points = sorted(
                (row["mb_per_s"], 1000 * row["ttft_s"])
                for row in rows
                if row["latency_ms"] == latency and row["mb_per_s"] is not None
            )
            speeds, times = zip(*points, strict=True) if points else ((), ())
            axes.plot(speeds, times, marker="o", label=f"{latency:g} ms round trip")
        axes.set(xscale="log", xlabel="link to Redis, MB/s", ylabel="time to the first token, ms")
        ticks = sorted({row["mb_per_s"] for row in rows if row["mb_per_s"] is not None})
        axes.set_xticks(ticks, [f"{speed:g}" for speed in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="per setting, for the median")
    parser.add_argument("--tokens", type=int, default=6000, help="length of a prompt")
    parser.add_argument("--mb-per-s", type=float, nargs="*", default=MB_PER_S, metavar="MB/s")
    parser.add_argument("--latency-ms", type=float, nargs="*", default=LATENCIES_MS, metavar="ms")
    parser.add_argument("--codecs", nargs="+", default=["none"], metavar="CODEC")
    parser.add_argument("--model", type=Path, help="a folder; without it, random weights")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """``errors``: 1 if the engine failed, which ends the measurements; else 0."""
    settings = [Setting(speed, ms) for ms in args.latency_ms for speed in args.mb_per_s[::-1]]
    settings.append(Setting(None, 0.0))
    prompts = {
        codec: [random_prompt(number + 1000 * seed, args.tokens) for seed in range(args.rounds)]
        for number, codec in enumerate(args.codecs)
    }
    results: list[Measured] = []
    errors = 0
    with _engine(prompts, args.model) as (link, engine, stored):
        for setting in progress.track(settings, description="links"):
            try:
                results += _measure(setting, link, engine, prompts)
            except InstanceError:
                errors += 1
                break
    ratios = [result.ttft_vs_recompute for result in results]
    return {
        "prompt_tokens": args.tokens,
        "rounds": args.rounds,
        "redis_bytes_per_token": stored,
        "worst_ttft_vs_recompute": max(ratios),
        "best_ttft_vs_recompute": min(ratios),
        "worst_first_ttft_vs_recompute": max(r.first_ttft_vs_recompute for r in results),
        "errors": errors,
        "settings": [asdict(result) for result in results],
    }


@contextlib.contextmanager
def _engine(
    prompts: Mapping[str, Sequence[Sequence[int]]], model: Path | None
) -> Iterator[tuple[SlowLink, VllmInstance, dict[str, float]]]:
    """The link, vLLM with a connector behind it, and a token's bytes in Redis by codec. Valkey has
    all prompts."""
    num_tokens = len(next(iter(prompts.values()))[0])
    batch = {
        "max_num_batched_tokens": max(8192, num_tokens),
        "max_model_len": max(8192, num_tokens + 256),
    }
    stored = {}
    link = SlowLink()
    with (
        warm_valkey(1024 * len(prompts)) as valkey,
        proxy_process(valkey.port, link) as port,
        Engines(model=model) as engines,
    ):
        for codec, its_prompts in prompts.items():
            near = tiered_transfer(cpu_gib=1.0, redis_url=valkey.url, redis_codec=codec)
            with engines.instance(f"writer of {codec}", near, **batch) as writer:
                for prompt in its_prompts:
                    writer.call(ttft_seconds, prompt)
                    writer.call(come_to_rest)
                keys = [key for prompt in its_prompts for key in writer.call(chunk_keys, prompt)]
                stored[codec] = _bytes_of(valkey, keys) / (len(keys) * _CHUNK_TOKENS)
        far = tiered_transfer(cpu_gib=1.0, redis_url=f"redis://127.0.0.1:{port}")
        engine = engines.start("behind the link", far, **batch)
        for seed in range(2):  # compilation, page faults
            engine.call(ttft_seconds, random_prompt(10_000 + seed, num_tokens))
        yield link, engine, stored


def _measure(
    setting: Setting,
    link: SlowLink,
    engine: VllmInstance,
    prompts: Mapping[str, Sequence[Sequence[int]]],
) -> list[Measured]:
    setting.apply(link)
    engine.call(empty_cpu_tier)
    first = engine.call(ttft_seconds, next(iter(prompts.values()))[0])
    engine.call(probe_link)
    seen = {codec: Seen() for codec in prompts}
    for turn, its_prompts in enumerate(zip(*prompts.values(), strict=True)):
        for codec, prompt in zip(seen, its_prompts, strict=True):
            seen[codec].serve(engine, prompt, load_first=bool(turn % 2))
    baseline = next(iter(seen.values()))
    return [
        Measured(
            codec=codec,
            mb_per_s=setting.mb_per_s,
            latency_ms=setting.latency_ms,
            ttft_vs_recompute=median_ratio(its.loading, its.recomputing),
            first_ttft_vs_recompute=round(first / statistics.median(baseline.recomputing), 4),
            ttft_vs_first_codec=median_ratio(its.loading, baseline.loading),
            ttft_s=median(its.loading),
            recompute_s=median(its.recomputing),
            loaded_tokens=int(statistics.median(its.loaded)),
        )
        for codec, its in seen.items()
    ]


@dataclass
class Seen:
    """For values of one kind: seconds to the first token, and loaded tokens."""

    loading: list[float] = field(default_factory=list)
    recomputing: list[float] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)

    def serve(self, engine: VllmInstance, prompt: Sequence[int], *, load_first: bool) -> None:
        """Once with the connector and once without."""
        for serve in (self._load, self._recompute) if load_first else (self._recompute, self._load):
            engine.call(empty_cpu_tier)
            serve(engine, prompt)

    def _load(self, engine: VllmInstance, prompt: Sequence[int]) -> None:
        before = engine.call(EngineProbe.external_hit_tokens)
        self.loading.append(engine.call(ttft_seconds, prompt))
        self.loaded.append(engine.call(EngineProbe.external_hit_tokens) - before)

    def _recompute(self, engine: VllmInstance, prompt: Sequence[int]) -> None:
        self.recomputing.append(engine.call(without_connector, ttft_seconds, prompt))


def _bytes_of(server: Server, keys: Sequence[bytes]) -> int:
    """The chunks' size in Redis."""
    tags = {key.hex().encode() for key in keys}
    names = [name for name in value_names(server) if name.split(b":")[2].rstrip(b"}") in tags]
    with server.client() as client:
        return sum(client.strlen(name) for name in names)
