"""The cost of naming weights by their bytes in memory, at an engine's start and at each reset.

A model of plain layers, ``--gib`` in all, is digested as by a worker on a CPU: on one thread,
without the interpreter lock. ``digest_s_per_gib`` is compared with a ``memcpy`` and a ``sha256`` of
the same bytes in the same rounds, and with ``file``: a file of as many bytes in the page cache, as
at a first start. Then an engine serves one prompt repeatedly: ``hit_after_reset_vs_hit`` is its
time to first token right after a reset, which reads the weights first, over that of other hits. The
form for GPUs (`vllm_compat/tensor_sums.py`) has not been measured.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.harness.engines import Engines
from benchmarks.harness.ratios import median, median_ratio
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import random_prompt, tiered_transfer

_LAYER_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=1.0, help="of weights")
    parser.add_argument("--rounds", type=int, default=9, help="for medians")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="of the engine's prompt")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    fields: dict[str, Any] = {"gib": args.gib, "rounds": args.rounds}
    fields |= _digests(args, progress)
    with Engines() as engines:
        engine = engines.start("ours", tiered_transfer(cpu_gib=1.0, compute_or_load="always"))
        hits, after_resets = engine.call(_hits, args.prompt_tokens, args.rounds)
    fields["hit_s"] = median(hits)
    fields["hit_after_reset_vs_hit"] = median_ratio(after_resets, hits, 3)
    return fields


def _digests(args: argparse.Namespace, progress: Progress) -> dict[str, float]:
    import torch

    from lmcache_connector.keys.file_digests import file_digests
    from lmcache_connector.vllm_compat.tensor_digest import model_digest

    num_layers = max(1, int(args.gib * 2**30) // _LAYER_BYTES)
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.randint(0, 256, (_LAYER_BYTES,), dtype=torch.uint8), False)
        for _ in range(num_layers)
    )
    copy = torch.empty(_LAYER_BYTES, dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights"
        with file.open("wb") as handle:
            for each in model:
                handle.write(each.numpy())
        ways: dict[str, Callable[[], object]] = {
            "digest": lambda: model_digest({"model": model}, ()),
            "memcpy": lambda: [copy.copy_(each) for each in model],
            "sha256": lambda: [hashlib.sha256(each.numpy()).digest() for each in model],
            "file": lambda: file_digests([file]),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in progress.track(range(args.rounds), description="digests"):
            for name, way in ways.items():
                started = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - started)
    gib = num_layers * _LAYER_BYTES / 2**30
    return {f"{name}_s_per_gib": median(taken) / gib for name, taken in seconds.items()}


def _hits(probe: EngineProbe, num_tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token of a hit outside of vLLM's cache, and of the first hit after a
    reset."""
    tokens, short = random_prompt(1, num_tokens), random_prompt(2, 8)
    probe.serve(tokens, 1)
    hits: list[float] = []
    after_resets: list[float] = []
    for _ in range(rounds):
        for seconds, is_named in ((after_resets, False), (hits, True)):
            probe.reset_prefix_cache()
            if is_named:
                probe.serve(short, 1)  # the weights are read meanwhile
            served = probe.serve(tokens, 1)
            assert served.external_hit_tokens > 0
            seconds.append(served.ttft_seconds)
    return hits, after_resets
