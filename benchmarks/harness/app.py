"""The command line: runs one benchmark and writes its result.

A benchmark is a module ``benchmarks/NAME.py``, with ``_`` for ``-``, and has two functions::

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]: ...

and, if plots help, a third one that ``report`` calls::

    def draw(result: dict[str, Any], target: Path) -> None: ...

``run`` returns JSON-ready fields: plain values, and lists of objects for tables. The result
also gets ``benchmark``, ``measured`` (date, duration, load of the machine before), ``machine`` and
``versions``. Progress goes to stderr; with ``--json -`` the last line on stdout is the JSON object.
``--keep`` writes the same object for ``report``, see :mod:`benchmarks.harness.results`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from benchmarks.harness.machine import surroundings
from benchmarks.harness.results import keep, to_line, variant_name

BENCHMARKS = {
    "convoy": "a burst of eight requests on one new prefix, against vLLM alone",
    "copy": "KV blocks between a paged cache and chunks, against one long memcpy",
    "growth": "how costs scale with prompts, cached chunks, requests and instances",
    "lmcache-next": "LMCache's newer engines as the CPU tier, against the one in use",
    "models": "model families with windows and states: hits, bytes and times of each tier",
    "field": "third-party tools: vLLM alone, this connector, LMCacheMPConnector",
    "policies": "what the CPU tier saves on block traces, against other policies and the optimum",
    "host-sharing": "engines of one host without a Redis: hits in each other's memory, and lookups",
    "overhead": "misses, stores, decode steps and lookups, against vLLM without a connector",
    "p2p": "KV transfer from prefill to decode, against vLLM's NixlConnector",
    "simulated-gpu": "hits on a simulated GPU, against recompute and an oracle; virtual time",
    "slowlink": "time to first token over slow and silent links, against recompute",
    "trace": "realistic load on an API server: no connector, this one, and LMCache's own",
    "ttft": "time to first token cold and from each tier, against vLLM alone and LMCache's own",
    "redis": "chunks to and from a real Redis or Valkey server",
    "sharing": "chunks that engines of one parallel size wrote, read by engines of another",
    "weights": "speed of digests of weights in memory, against a copy; a hit after a reset",
    "transformers": "generate of Hugging Face transformers: cold, from each tier, and plain",
}
COMMANDS = {
    "all": "every benchmark but field, each in a process of its own, kept and reported",
    "gpu": "tests and copies on a machine with a CUDA GPU, without a network",
    "report": "write RESULTS.md, a page per benchmark and the plots from the results kept",
}
# With small pages, the place of an engine's memory decides its speed: two engines without any
# connector differed by 20 %, with huge pages not at all. All engines compute with the cores that
# vLLM takes without a connector.
_ENGINE_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
}
_COMMAND_MODULES = {"all": "suite", "gpu": "gpu", "report": "report"}


def main(argv: Sequence[str] = tuple(sys.argv[1:])) -> int:
    """Run the benchmark that ``argv`` names; only its module is imported."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        epilog="\n".join(f"{name}: {what}" for name, what in (BENCHMARKS | COMMANDS).items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = sorted(BENCHMARKS | COMMANDS)
    parser.add_argument("name", choices=names, nargs="?", default="all", help="what to run (all)")
    name = parser.parse_args(argv[:1]).name
    if name in COMMANDS:
        return int(
            importlib.import_module(f"benchmarks.harness.{_COMMAND_MODULES[name]}").main(argv[1:])
        )
    return _run_benchmark(name, argv[1:])


def benchmark_module(name: str) -> Any:
    """A benchmark's module, imported."""
    return importlib.import_module(f"benchmarks.{name.replace('-', '_')}")


def benchmark_parser(name: str) -> argparse.ArgumentParser:
    """A benchmark's own options, and the common ones."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=BENCHMARKS[name]
    )
    parser.add_argument("--json", metavar="PATH|-", help="where the result goes; - is stdout")
    parser.add_argument(
        "--keep",
        metavar="VARIANT",
        nargs="?",
        const="",
        type=variant_name,
        help="keep the result in benchmarks/results, under the benchmark's name and VARIANT",
    )
    benchmark_module(name).add_arguments(parser)
    return parser


def _run_benchmark(name: str, argv: Sequence[str]) -> int:
    args = benchmark_parser(name).parse_args(argv)
    module = benchmark_module(name)
    os.environ.update(_ENGINE_ENVIRONMENT)  # for the processes started from here on
    load, begun, started = os.getloadavg()[0], datetime.now(UTC), time.perf_counter()
    with progress_bar() as progress:
        fields = module.run(args, progress)
    measured = {
        "on": begun.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - started, 1),
        "load_before": round(load, 2),
    }
    result = {"benchmark": name, **fields, "measured": measured, **surroundings()}
    if args.keep is not None:
        keep(result, args.keep)
    emit(result, args.json)
    return 0


def emit(result: dict[str, Any], target: str | None) -> None:
    """Write ``result`` as a line of JSON to a file or stdout, or as text to stderr."""
    if target is None:
        Console(stderr=True).print_json(data=result)
    elif target == "-":
        print(to_line(result), flush=True)
    else:
        Path(target).write_text(to_line(result) + "\n", encoding="utf-8")


def progress_bar() -> Progress:
    """A progress bar on stderr that disappears at its end."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    )
