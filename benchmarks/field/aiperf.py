"""``aiperf``: conversations of a published block trace, in its order.

A small machine cannot compute contexts of real length: blocks are made shorter, and requests that
are still too long are left out. A short part of a trace seldom repeats a prefix: the conversations
of several turns that begin first are taken, the first turns of each. The trace's pauses are left
out: the next request is sent when one of those at work is answered, so that turns of one
conversation may overlap.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.field.tool import Target, installed, options, packages_of, program
from benchmarks.harness.block_traces import BlockTrace, read_trace

NAME = "aiperf"
_RESULT = "profile_export_aiperf.json"
_TOKENIZER, _REVISION = "field/tokenizer", "0" * 40
_NUM_CONVERSATIONS = 8  # more if they have fewer turns
_ROOT_BLOCKS = 3  # prompts that share these blocks are one conversation
_MARGIN_TOKENS = 64  # a prompt may have more tokens as text than planned
_CONTEXTS_PER_REQUEST = 4  # requests per context of the load


class AiPerf:
    """``trace``: as :func:`~benchmarks.harness.block_traces.read_trace` reads it."""

    def __init__(self, trace: Path) -> None:
        self.name = f"{NAME}-{trace.name.partition('.')[0]}"
        self._trace = trace

    def version(self) -> str | None:
        return installed(NAME, packages_of(NAME))

    def command(self, target: Target) -> list[str]:
        load = target.load
        trace = read_trace(self._trace)
        block_tokens = trace.block_tokens // load.trace_scale
        room = load.max_model_len - load.output_tokens - _MARGIN_TOKENS
        asked = conversations(
            trace, load.num_contexts * _CONTEXTS_PER_REQUEST, room // block_tokens
        )
        target.folder.mkdir(parents=True, exist_ok=True)
        scaled = target.folder / "trace.jsonl"
        scaled.write_text(_lines(asked, block_tokens, load.output_tokens), encoding="utf-8")
        given = {
            "model": target.model_name,
            "url": target.url,
            "endpoint-type": "completions",
            "streaming": True,
            "tokenizer": _TOKENIZER,
            "input-file": scaled,
            "custom-dataset-type": "mooncake_trace",
            "isl-block-size": block_tokens,
            "concurrency": load.concurrency,
            "request-count": len(asked),
            "artifact-dir": target.folder,
            "ui": "none",
            "workers-max": 1,
            "record-processors": 1,
            "no-gpu-telemetry": True,
            "no-server-metrics": True,
        }
        body = ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
        hub = _hub(target.tokenizer, target.folder / "hub")
        offline = ["env", f"HF_HUB_CACHE={hub}", "HF_HUB_OFFLINE=1"]
        return [*offline, program(NAME, NAME), "profile", *options(given), *body]

    def figures(self, folder: Path) -> dict[str, float]:
        (path,) = folder.rglob(_RESULT)
        result = json.loads(path.read_text(encoding="utf-8"))
        ttft, errors = result["time_to_first_token"], result.get("error_request_count")
        return {
            "ttft_mean_ms": ttft["avg"],
            "ttft_p50_ms": ttft["p50"],
            "ttft_p99_ms": ttft["p99"],
            "requests_per_s": result["request_throughput"]["avg"],
            "requests": result["request_count"]["avg"],
            "failed": errors["avg"] if errors else 0,
            "latency_mean_ms": result["request_latency"]["avg"],
        }


def conversations(trace: BlockTrace, num_requests: int, max_blocks: int) -> list[list[int]]:
    """Prompts of at most ``max_blocks``, each as the numbers of its blocks, in the trace's order.
    Raises ``ValueError`` if no conversation has two of them."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, (_, blocks) in enumerate(trace.requests):
        if _ROOT_BLOCKS < len(blocks) <= max_blocks:
            found.setdefault(tuple(blocks[:_ROOT_BLOCKS]), []).append(number)
    taken: list[int] = []
    for turns in found.values():
        if len(turns) > 1 and len(taken) < num_requests:
            taken += turns[: max(2, num_requests // _NUM_CONVERSATIONS)]
    if not taken:
        raise ValueError(f"{trace.name}: no conversation fits into {max_blocks} blocks")
    return [trace.requests[number][1] for number in sorted(taken)[:num_requests]]


def _hub(tokenizer: Path, hub: Path) -> Path:
    """A hub's download cache with ``tokenizer``: aiperf's processes that make prompts accept no
    folder."""
    entry = hub / ("models--" + _TOKENIZER.replace("/", "--"))
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(_REVISION)
    (entry / "snapshots").mkdir()
    (entry / "snapshots" / _REVISION).symlink_to(tokenizer.resolve())
    return hub


def _lines(asked: list[list[int]], block_tokens: int, output_tokens: int) -> str:
    """In Mooncake's format, without timestamps: as many at once as the load says."""
    lines = [
        {
            "input_length": len(blocks) * block_tokens,
            "output_length": output_tokens,
            "hash_ids": blocks,
        }
        for blocks in asked
    ]
    return "\n".join(map(json.dumps, lines)) + "\n"
