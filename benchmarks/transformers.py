"""``generate`` of transformers: cold, from the CPU tier, and from Redis by another process.

Each round has its own prompt, which ``generate`` computes with the tiers and then loads from the
CPU tier; another process loads the last round's from Valkey. ``cold_s``, ``cpu_hit_s`` and
``redis_hit_s`` are times to the first token. ``generate_overhead`` compares ``--max-tokens`` tokens
without hits with plain ``generate``, round by round in changing order.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.harness.engines import MODELS
from benchmarks.harness.ratios import median, median_ratio, pairwise, spread
from benchmarks.harness.servers import warm_valkey
from examples.tiny_model import build_tiny_model
from tests.support.engines.generate_child import generate_elsewhere, kv_digest
from tests.support.engines.settings import random_prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny", help=f"{' or '.join(MODELS)}, or a folder")
    parser.add_argument("--tokens", type=int, default=6000, help="length of a prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="generated for the overhead")
    parser.add_argument("--rounds", type=int, default=5, help="for medians")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lmcache-connector-benchmark-") as folder:
        model = Path(args.model)
        if args.model in MODELS:
            model = build_tiny_model(Path(folder) / "model", MODELS[args.model])
        with warm_valkey() as valkey:
            return _measure(args, progress, model, {"cpu_gib": 2.0, "redis_url": valkey.url})


def _measure(
    args: argparse.Namespace, progress: Progress, folder: Path, config: dict[str, Any]
) -> dict[str, Any]:
    contest = _Contest(folder, config, args)
    try:
        for number in progress.track(range(-1, args.rounds), description="rounds"):
            contest.round(number)
        prompt, kv_tokens = contest.last_prompt, contest.num_hit_tokens
        digest = kv_digest(contest.last_cold, kv_tokens)
    finally:
        contest.tiers.close()  # its last writes go out
    options = {"new_tokens": 1, "kv_tokens": kv_tokens, "warm_up": args.tokens}
    elsewhere = [
        generate_elsewhere(folder, config, prompt, **options, threads=os.cpu_count() or 1)
        for _ in progress.track(range(3), description="another process")
    ]
    seconds = contest.seconds
    return {
        "model": args.model,
        "prompt_tokens": args.tokens,
        "rounds": args.rounds,
        "cold_s": median(seconds["cold"]),
        "cpu_hit_s": median(seconds["hit"]),
        "redis_hit_s": median([each["seconds"] for each in elsewhere]),
        "cpu_hit_vs_cold": median_ratio(seconds["hit"], seconds["cold"]),
        "hit_tokens": kv_tokens,
        "redis_hit_chunks": min(each["counts"]["redis_chunks"] for each in elsewhere),
        "logits_equal": all(contest.logits_equal),
        "kv_bytes_equal": all(contest.bytes_equal)
        and all(each["kv"] == digest for each in elsewhere),
        "generate_overhead": median_ratio(seconds["missing"], seconds["plain"]),
        "generate_overhead_spread": spread(pairwise(seconds["missing"], seconds["plain"])),
        "generate_plain_s": median(seconds["plain"]),
    }


class _Contest:
    """One model, plain and with the tiers. Round -1 warms up, unmeasured."""

    def __init__(self, folder: Path, config: dict[str, Any], args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from lmcache_connector.transformers import KVTiers

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.tiers = KVTiers(self.model, config)
        self.args = args
        self.num_hit_tokens = (args.tokens - 1) // self.tiers.chunk_size * self.tiers.chunk_size
        self.seconds: dict[str, list[float]] = {}
        self.logits_equal: list[bool] = []
        self.bytes_equal: list[bool] = []
        self.last_prompt: list[int] = []
        self.last_cold: list[Any] = []

    def round(self, number: int) -> None:
        taken = self._overhead(number) | self._hit(number)
        for name, seconds in taken.items():
            self.seconds.setdefault(name, []).append(seconds)
        if number < 0:
            self.seconds.clear()

    def _overhead(self, number: int) -> dict[str, float]:
        """``args.max_tokens`` tokens without hits, and by plain ``generate``."""
        prompt, taken = random_prompt(1000 + number, self.args.tokens), {}
        for name in ("plain", "missing") if number % 2 else ("missing", "plain"):
            cache = self.tiers.new_cache() if name == "missing" else self._plain_cache()
            started = time.perf_counter()
            self._generate(prompt, cache, self.args.max_tokens)
            taken[name] = time.perf_counter() - started
            self.tiers.finish_stores()
        return taken

    def _hit(self, number: int) -> dict[str, float]:
        """The first token, cold and from the CPU tier, and whether the loaded KV is right."""
        import torch

        prompt, taken, outputs = random_prompt(number + 1, self.args.tokens), {}, {}
        for name in ("cold", "hit"):
            cache, before = self.tiers.new_cache(), self.tiers.counts
            started = time.perf_counter()
            logits = self._generate(prompt, cache, 1)
            taken[name] = time.perf_counter() - started
            self.tiers.finish_stores()
            outputs[name] = cache.tensors(), logits
        found = self.tiers.counts.hit_chunks - before.hit_chunks
        if found * self.tiers.chunk_size != self.num_hit_tokens:
            raise RuntimeError(f"{found} chunks of a prompt were restored")
        cold = [each[:, :, : self.num_hit_tokens] for each in outputs["cold"][0]]
        hit = [each[:, :, : self.num_hit_tokens] for each in outputs["hit"][0]]
        self.bytes_equal.append(all(map(torch.equal, hit, cold)))
        given = self._plain_cache()
        for index in range(len(cold) // 2):
            given.update(cold[2 * index], cold[2 * index + 1], index)
        self.logits_equal.append(torch.equal(outputs["hit"][1], self._generate(prompt, given, 1)))
        self.last_prompt, self.last_cold = prompt, cold
        return taken

    def _plain_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _generate(self, prompt: list[int], cache: Any, num_tokens: int) -> Any:
        """Logits of the first token."""
        import torch

        output = self.model.generate(
            torch.tensor([prompt]),
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.logits[0]
