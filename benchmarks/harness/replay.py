"""Traces replayed by vLLM's own client (``vllm bench serve``), and the server's counts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tests.support.engines.api_server import ApiServer


@dataclass(frozen=True)
class CachedTokens:
    """Prompt tokens so far, and the sources of the cached ones.

    ``declined``: hits of this connector that were computed as the quicker way. ``dropped``: chunks
    not written to Redis.
    """

    prompt: int
    device: int
    host: int
    external: int
    declined: int
    dropped: int

    def since(self, earlier: CachedTokens) -> CachedTokens:
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return CachedTokens(*(now - then for now, then in pairs))


def cached_tokens(server: ApiServer) -> CachedTokens:
    """Read them from ``/metrics``."""

    def of(source: str) -> int:
        name = "vllm:prompt_tokens_cached_by_source_total"
        return int(server.metric(name, f'source="{source}"'))

    return CachedTokens(
        prompt=int(server.metric("vllm:prompt_tokens_total")),
        device=of("device"),
        host=of("host"),
        external=of("external_unspecified"),
        declined=int(server.metric("vllm:lmcache_declined_tokens_total")),
        dropped=int(server.metric("vllm:lmcache_dropped_writes_total")),
    )


def replay(server: ApiServer, model: Path, trace: Path, piece_tokens: int) -> dict[str, Any]:
    """Replay a timed trace with vLLM's own client. Returns its result object; ``ttfts`` (seconds)
    and ``errors`` are per request."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = FlexibleArgumentParser()
    add_cli_args(parser)
    host, port = server.address.split(":")
    num_lines = len(trace.read_text(encoding="utf-8").splitlines())
    options = {
        "--backend": "vllm",
        "--host": host,
        "--port": port,
        "--endpoint": "/v1/completions",
        "--model": "tiny",
        "--served-model-name": "tiny",
        "--tokenizer": str(model),
        "--dataset-name": "timed_trace",
        "--dataset-path": str(trace),
        "--timed-trace-chunk-hash-size": str(piece_tokens),
        "--num-prompts": str(num_lines),
        "--percentile-metrics": "ttft,tpot,e2el",
        "--metric-percentiles": "50,90,99",
        "--temperature": "0",
    }
    args = parser.parse_args([word for pair in options.items() for word in pair])
    args.disable_tqdm = True
    args.save_detailed = True  # keeps figures of each request
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        result: dict[str, Any] = asyncio.run(main_async(args))
    return result
