"""``lmcache bench engine``: questions about long documents, and chats of several rounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.field.tool import Load, Target, installed, options

_RESULT = "bench_summary.json"
_HISTORY_PARTS = 4  # the system prompt is a quarter of a chat's context
_CHAT_SECONDS = 25
_CHATS_PER_SECOND = 4.0  # more than two cores answer: each chat waits for its answer anyway


class _LmcacheBench:
    """Comes with LMCache."""

    name: str
    _workload: str

    def version(self) -> str | None:
        return installed("lmcache")

    def command(self, target: Target) -> list[str]:
        load = target.load
        given = {
            "engine-url": target.url,
            "model": target.model_name,
            "workload": self._workload,
            "kv-cache-volume": 1,
            "tokens-per-gb-kvcache": load.num_contexts * load.context_tokens,
            "ignore-eos": True,
            "output-dir": target.folder,
            "json": True,
            "quiet": True,
            "no-csv": True,
            "no-interactive": True,
            **self._own_options(load),
        }
        lmcache = str(Path(sys.executable).with_name("lmcache"))
        return [lmcache, "bench", "engine", *options(given)]

    def figures(self, folder: Path) -> dict[str, float]:
        result = json.loads((folder / _RESULT).read_text(encoding="utf-8"))["results"]
        return {
            "ttft_mean_ms": result["mean_ttft_ms"],
            "ttft_p50_ms": result["p50_ttft_ms"],
            "ttft_p99_ms": result["p99_ttft_ms"],
            "requests_per_s": result["successful_requests"] / result["elapsed_time"],
            "requests": result["successful_requests"],
            "failed": result["failed_requests"],
            "latency_mean_ms": result["mean_request_latency_ms"],
            "input_tokens_per_s": result["input_throughput"],
        }

    def _own_options(self, load: Load) -> dict[str, object]:
        raise NotImplementedError


class LongDocQa(_LmcacheBench):
    """Each document is sent once, unmeasured; then two questions about each, in any order."""

    name = "lmcache-long-doc-qa"
    _workload = "long-doc-qa"

    def _own_options(self, load: Load) -> dict[str, object]:
        return {
            "ldqa-document-length": load.context_tokens,
            "ldqa-query-per-document": load.asks_per_context - 1,
            "ldqa-num-inflight-requests": load.concurrency,
            "ldqa-max-output-length": load.output_tokens,
        }


class MultiRoundChat(_LmcacheBench):
    """Chats with a history, in turn; each is sent once, unmeasured, before its first round."""

    name = "lmcache-multi-round-chat"
    _workload = "multi-round-chat"

    def _own_options(self, load: Load) -> dict[str, object]:
        system = load.context_tokens // _HISTORY_PARTS
        return {
            "mrc-shared-prompt-length": system,
            "mrc-chat-history-length": load.context_tokens - system,
            "mrc-user-input-length": load.suffix_tokens // 2,
            "mrc-output-length": load.output_tokens,
            "mrc-qps": _CHATS_PER_SECOND,
            "mrc-duration": _CHAT_SECONDS,
        }
