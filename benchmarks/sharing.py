"""Real engines of different shapes through one Valkey: what one wrote, another reads.

Writers run first, each alone, and leave. Then readers start, with nothing but the server in common
with them. Bytes are compared per KV head over all layers, in the order tokens have by their meaning
(:mod:`tests.support.kv_digests`): neither block sizes nor ranks nor our own idea of a layout
matter.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from tests.support.instance import VllmInstance
from tests.support.probe import DIGEST_TOKENS, Served
from tests.support.servers import running_server, valkey_binary
from tests.support.tiny_model import DEMO_SHAPE, build_tiny_model

_VOCABULARY = 2000
_WARM_UP_TOKENS = 700


@dataclass(frozen=True)
class Shape:
    """How an instance is split up."""

    tensor_parallel_size: int = 1
    block_size: int = 128

    @property
    def name(self) -> str:
        return f"tp{self.tensor_parallel_size}-block{self.block_size}"

    @property
    def prepare(self) -> Callable[[], None] | None:
        return _allow_blocks_of_16 if self.block_size % 32 else None


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
    Case(Shape(block_size=16), Shape(block_size=128)),
    Case(Shape(block_size=128), Shape(block_size=16)),
    Case(Shape(block_size=128), Shape(block_size=32)),
    Case(Shape(block_size=16), Shape(2, block_size=128)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=3100, help="length of each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="prompts per case, for medians")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    writers = list(dict.fromkeys(case.writer for case in CASES))
    readers = list(dict.fromkeys(case.reader for case in CASES))
    task = progress.add_task("Starting vLLM", total=len(writers) + len(readers))
    rng = random.Random(0)

    def prompts() -> list[list[int]]:
        return [_prompt(rng, args.prompt_tokens) for _ in range(args.rounds)]

    asked = {case: prompts() for case in CASES}
    written: dict[Case, list[Served]] = {}
    results: dict[Case, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-connector-sharing-") as folder,
        running_server(valkey_binary() or "valkey-server") as server,
    ):
        bench = _Bench(Path(folder), server.unix_url)
        for shape in writers:
            progress.update(task, description=f"{shape.name} writes")
            with bench.instance(shape) as instance:
                for case in (case for case in CASES if case.writer == shape):
                    written[case] = [instance.serve(prompt) for prompt in asked[case]]
            progress.advance(task)
        for shape in readers:
            progress.update(task, description=f"{shape.name} reads")
            with bench.instance(shape) as instance:
                instance.serve(_prompt(rng, _WARM_UP_TOKENS))
                cold = [instance.serve(prompt) for prompt in prompts()]
                for case in (case for case in CASES if case.reader == shape):
                    hits = [instance.serve(prompt) for prompt in asked[case]]
                    results[case] = _result(case, args.prompt_tokens, written[case], hits, cold)
            progress.advance(task)
    return {"cases": [results[case] for case in CASES]}


class _Bench:
    """Makes instances that share nothing but a model and a server."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self._folder = folder
        self._model = build_tiny_model(folder / "model", DEMO_SHAPE)
        self._transfer = {
            "kv_connector": "LMCacheTieredConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_gib": 1,
                "redis_url": redis_url,
                "compute_or_load": "always",
                "lookup_deadline_seconds": 10.0,
                "shutdown_seconds": 30.0,  # the last writes of a writer
            },
        }

    def instance(self, shape: Shape) -> VllmInstance:
        return VllmInstance(
            self._model,
            self._transfer,
            self._folder / f"{shape.name}.log",
            shape.prepare,
            tensor_parallel_size=shape.tensor_parallel_size,
            block_size=shape.block_size,
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
    """``hit_tokens``: the least of all rounds. Times are medians, in seconds."""
    return {
        "writer": _shape_fields(case.writer),
        "reader": _shape_fields(case.reader),
        "hit_tokens": min(hit.external_hit_tokens for hit in hits),
        "prompt_tokens": prompt_tokens,
        "kv_bytes_equal": all(map(_same_bytes, hits, written)),
        "shards_compared": sum(len(heads) for hit in hits for heads in _loaded(hit, hit)),
        "ttft_s": round(statistics.median(hit.ttft_seconds for hit in hits), 4),
        "cold_s": round(statistics.median(served.ttft_seconds for served in cold), 4),
    }


def _shape_fields(shape: Shape) -> dict[str, int]:
    return {
        "tensor_parallel_size": shape.tensor_parallel_size,
        "block_size": shape.block_size,
    }


def _same_bytes(hit: Served, written: Served) -> bool:
    """Whether every KV head of every chunk that was a hit is what its writer computed."""
    return () != _loaded(hit, hit) == _loaded(hit, written)


def _loaded(hit: Served, of: Served) -> tuple[tuple[str, ...], ...]:
    return of.shard_digests[: hit.external_hit_tokens // DIGEST_TOKENS]


def _prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1, _VOCABULARY) for _ in range(num_tokens)]


def _allow_blocks_of_16() -> None:
    """vLLM's CPU attention has a kernel for blocks of 16 tokens, but declares multiples of 32."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
        lambda kv_cache_spec=None: [MultipleOf(16)]
    )
