"""Real engines of different shapes through one Valkey: readers load the writers' chunks.

Writers run first, each alone, and end. Then readers start, and share only the server with them.
Bytes are compared per KV head over all layers, tokens in their order
(:mod:`tests.support.engines.kv_digests`), so block sizes, ranks and our layout do not matter.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from rich.progress import Progress

from benchmarks.harness.engines import Engines
from benchmarks.harness.ratios import median
from tests.support.engines.instance import VllmInstance
from tests.support.engines.probe import DIGEST_TOKENS, Served
from tests.support.engines.settings import PATIENT, random_prompt, tiered_transfer
from tests.support.redis.servers import running_server, valkey_binary

_WARM_UP_TOKENS = 700


@dataclass(frozen=True)
class Shape:
    """An engine's ranks, and its block size in tokens."""

    tensor_parallel_size: int = 1
    block_size: int = 128

    @property
    def name(self) -> str:
        return f"tp{self.tensor_parallel_size}-block{self.block_size}"


@dataclass(frozen=True)
class Case:
    """One writer, one reader."""

    writer: Shape
    reader: Shape


CASES = (
    Case(Shape(1), Shape(1)),
    Case(Shape(1), Shape(2)),
    Case(Shape(2), Shape(1)),
    Case(Shape(2), Shape(2)),
    Case(Shape(block_size=32), Shape(block_size=128)),
    Case(Shape(block_size=128), Shape(block_size=64)),
    Case(Shape(block_size=128), Shape(block_size=32)),
    Case(Shape(block_size=32), Shape(2, block_size=128)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=3100, help="length of each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="prompts per case, for medians")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    writers = list(dict.fromkeys(case.writer for case in CASES))
    readers = list(dict.fromkeys(case.reader for case in CASES))
    task = progress.add_task("Starting vLLM", total=len(writers) + len(readers))
    seeds = count()

    def prompts() -> list[list[int]]:
        return [random_prompt(next(seeds), args.prompt_tokens) for _ in range(args.rounds)]

    asked = {case: prompts() for case in CASES}
    written: dict[Case, list[Served]] = {}
    results: dict[Case, dict[str, Any]] = {}
    with running_server(valkey_binary() or "valkey-server") as server, Engines() as engines:
        for shape in writers:
            progress.update(task, description=f"{shape.name} writes")
            with _instance(engines, shape, server.unix_url) as instance:
                for case in (case for case in CASES if case.writer == shape):
                    written[case] = [instance.serve(prompt) for prompt in asked[case]]
            progress.advance(task)
        for shape in readers:
            progress.update(task, description=f"{shape.name} reads")
            with _instance(engines, shape, server.unix_url) as instance:
                instance.serve(random_prompt(next(seeds), _WARM_UP_TOKENS))
                cold = [instance.serve(prompt) for prompt in prompts()]
                for case in (case for case in CASES if case.reader == shape):
                    hits = [instance.serve(prompt) for prompt in asked[case]]
                    results[case] = _result(case, args.prompt_tokens, written[case], hits, cold)
            progress.advance(task)
    return {"cases": [results[case] for case in CASES]}


def _instance(engines: Engines, shape: Shape, redis_url: str) -> VllmInstance:
    """Instances share only a model and a server."""
    transfer = tiered_transfer(
        cpu_gib=1,
        redis_url=redis_url,
        compute_or_load="always",
    )
    return engines.instance(
        shape.name,
        transfer,
        **asdict(shape),
        limits={**PATIENT, "SHUTDOWN_SECONDS": 30.0},  # for a writer's last writes
        kv_cache_memory_bytes=512 << 20,
        max_model_len=8192,
    )


def _result(
    case: Case,
    prompt_tokens: int,
    written: Sequence[Served],
    hits: Sequence[Served],
    cold: Sequence[Served],
) -> dict[str, Any]:
    """``hit_tokens``: the least of all rounds. Times are medians in seconds."""
    return {
        "writer": asdict(case.writer),
        "reader": asdict(case.reader),
        "hit_tokens": min(hit.external_hit_tokens for hit in hits),
        "prompt_tokens": prompt_tokens,
        "kv_bytes_equal": all(map(_same_bytes, hits, written)),
        "shards_compared": sum(len(heads) for hit in hits for heads in _loaded(hit, hit)),
        "ttft_s": median([hit.ttft_seconds for hit in hits]),
        "cold_s": median([served.ttft_seconds for served in cold]),
    }


def _same_bytes(hit: Served, written: Served) -> bool:
    """Whether every KV head of every hit chunk equals the writer's computation."""
    return () != _loaded(hit, hit) == _loaded(hit, written)


def _loaded(hit: Served, of: Served) -> tuple[tuple[str, ...], ...]:
    return of.shard_digests[: hit.external_hit_tokens // DIGEST_TOKENS]
