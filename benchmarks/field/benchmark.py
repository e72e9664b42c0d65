"""Other people's tools on vLLM alone, this connector and ``LMCacheMPConnector``.

The tools: ``vllm bench serve`` with repeated prefixes and without any, ``lmcache bench engine``
with long documents and with chats, ``cache-pressure``, and ``aiperf`` with conversations of a block
trace. The last two have their own environments, which ``make field`` sets up. Models:
SmolLM2-135M-Instruct (``trained``), and a random one with its tokenizer (``tiny``). Both connectors
get the same memory and no Redis. By default a tool's contexts take 2.5 times vLLM's paged cache.

``table`` has the medians of the rounds, and cost ratios: below 1 is better for every measure.
``runs`` has each tool's own figures; all output of the tools stays in ``--outputs``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.field.aiperf import NAME as AIPERF
from benchmarks.field.aiperf import AiPerf
from benchmarks.field.cache_pressure import CachePressure
from benchmarks.field.lmcache_bench import LongDocQa, MultiRoundChat
from benchmarks.field.matrix import Bounds, Cell, Matrix, Model
from benchmarks.field.models import LOADS, model_folder
from benchmarks.field.table import MP, NONE, OURS, comparison, headline, run_rows
from benchmarks.field.tool import ENVIRONMENTS, Tool
from benchmarks.field.vllm_bench import VllmBench
from benchmarks.peers.connectors import lmcache_server
from tests.support import ROOT
from tests.support.engines.api_server import ApiServer, started_api
from tests.support.engines.settings import BLOCK_SIZE, random_prompt, tiered_transfer

CONNECTORS = (NONE, OURS, MP)
CONNECTOR_GIB = 3.0
_KV_CACHE_BYTES = 1 << 30  # more than any load's blocks
_WARM_UPS, _WARM_UP_TOKENS, _WARM_UP_SEED = 3, 700, 10**6
SAMPLE = ROOT / "benchmarks" / "traces" / "sample.jsonl"


def tools(traces: Sequence[Path] = (SAMPLE,)) -> dict[str, tuple[Tool, ...]]:
    """All tools by name; ``aiperf`` once per trace."""
    alone: tuple[Tool, ...] = (
        VllmBench(),
        VllmBench(shares_prefixes=False),
        LongDocQa(),
        MultiRoundChat(),
        CachePressure(),
    )
    return {tool.name: (tool,) for tool in alone} | {AIPERF: tuple(map(AiPerf, traces))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = tuple(tools())
    parser.add_argument("--tools", nargs="*", choices=names, default=names)
    parser.add_argument("--models", nargs="*", choices=tuple(LOADS), default=tuple(LOADS))
    parser.add_argument("--connectors", nargs="*", choices=CONNECTORS, default=CONNECTORS)
    parser.add_argument("--rounds", type=int, default=1, help="of all tools and servers")
    parser.add_argument("--contexts", type=int, default=10, help="contexts of each tool's load")
    parser.add_argument("--seconds", type=float, default=300, help="longest run of a tool")
    parser.add_argument("--minutes", type=float, default=55, help="nothing begins after that")
    parser.add_argument(
        "--trace", type=Path, nargs="+", default=[SAMPLE], help="for aiperf: .jsonl(.gz), .tar.gz"
    )
    parser.add_argument("--outputs", type=Path, default=ENVIRONMENTS / "outputs")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    all_tools = tools(args.trace)
    with tempfile.TemporaryDirectory(prefix="lmcache-connector-benchmark-") as scratch:
        models = [
            Model(
                name,
                model_folder(name, Path(scratch)),
                replace(LOADS[name], num_contexts=args.contexts),
            )
            for name in args.models
        ]
        matrix = Matrix(
            [tool for name in args.tools for tool in all_tools[name]],
            models,
            args.connectors,
            lambda cell: _served(cell, Path(scratch)),
            args.outputs,
            Bounds(args.seconds, 60 * args.minutes),
        )
        runs = matrix.run(args.rounds, progress)
    rows = comparison(runs)
    return {
        **headline(rows),
        "failed_runs": sum(one.failure is not None for one in runs),
        "rounds": args.rounds,
        "connector_gib": CONNECTOR_GIB,
        "traces": ", ".join(trace.name for trace in args.trace),
        "tools": [{"tool": tool.name, "version": tool.version()} for tool in matrix.tools],
        "loads": [{"model": model.name} | asdict(model.load) for model in models],
        "table": rows,
        "runs": run_rows(runs),
    }


@contextmanager
def _served(cell: Cell, scratch: Path) -> Iterator[ApiServer]:
    load = cell.model.load
    arguments = (
        *("--max-model-len", str(load.max_model_len)),
        # An absolute size: vLLM's default is a share of the machine's memory, which others use.
        *("--kv-cache-memory-bytes", str(_KV_CACHE_BYTES)),
        *("--num-gpu-blocks-override", str(load.paged_tokens // BLOCK_SIZE)),
        *("--override-generation-config", json.dumps({"temperature": 0})),
    )
    with (
        _transfer(cell.connector, scratch / "lmcache-server.log") as transfer,
        started_api(cell.model.folder, transfer, scratch / "server.log", *arguments) as api,
    ):
        api.wait_ready()
        for _ in range(_WARM_UPS):
            api.complete(random_prompt(_WARM_UP_SEED, _WARM_UP_TOKENS))
        yield api
        api.stop()


@contextmanager
def _transfer(connector: str, log: Path) -> Iterator[dict[str, Any] | None]:
    """``--kv-transfer-config``, and its server."""
    if connector == MP:
        with lmcache_server(log, CONNECTOR_GIB) as transfer:
            yield transfer
    else:
        yield tiered_transfer(cpu_gib=CONNECTOR_GIB) if connector == OURS else None
