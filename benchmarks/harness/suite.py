"""``all``: every benchmark but the separate ones, one after the other, then the report.

Each runs in its own process, so that none inherits another's memory, threads or failure. A failure
or a time-out is reported, and the next one begins.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from benchmarks.harness import report
from benchmarks.harness.app import BENCHMARKS, emit
from tests.support import ROOT
from tests.support.processes import end_session
from tests.support.redis.servers import redis_binary

_MAX_SECONDS = 1200.0

# `make field` runs this one: it needs other people's tools.
APART = frozenset({"field"})

# Benchmarks with several variants: their arguments by variant. The others run without any.
_VARIANTS: dict[str, dict[str, list[str]]] = {
    "copy": {
        f"{layout}-{block_size}": ["--layout", layout, "--block-size", block_size]
        for layout in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
        for block_size in ("128", "16")
    },
    "redis": {
        **({"redis-tcp": ["--server", "redis"]} if redis_binary() else {}),
        "valkey-tcp": ["--server", "valkey"],
        "valkey-unix": ["--server", "valkey", "--unix", "--no-lmcache"],
    },
    "ttft": {
        "tiny": ["--models", "tiny"],
        "tiny-chunks-of-256": ["--models", "tiny", "--chunk-size", "256", "--no-peers"],
        "large": ["--models", "large", "--rounds", "6"],
    },
}


@dataclass(frozen=True)
class Job:
    """One child process. ``arguments`` are the benchmark's own."""

    name: str
    variant: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name

    @property
    def command(self) -> list[str]:
        keep = ["--keep", self.variant] if self.variant else ["--keep"]
        return [sys.executable, "-m", "benchmarks", self.name, *self.arguments, *keep]


@dataclass(frozen=True)
class Ended:
    """A job's end. ``failure``: the reason in a few words."""

    benchmark: str
    seconds: float
    failure: str | None = None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks all")
    parser.add_argument("--json", metavar="PATH|-", help="where the summary goes; - is stdout")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    ended = run_jobs(all_jobs(), console)
    report.main(())
    console.print(f"Written: {report.TARGET.relative_to(ROOT)}")
    emit(summary(ended), args.json or "-")
    return int(any(one.failure for one in ended))


def all_jobs() -> list[Job]:
    jobs = []
    for name in (each for each in BENCHMARKS if each not in APART):
        variants = _VARIANTS.get(name, {"": []})
        jobs += [Job(name, variant, tuple(more)) for variant, more in variants.items()]
    return jobs


def run_jobs(
    jobs: Iterable[Job], console: Console, max_seconds: float = _MAX_SECONDS
) -> list[Ended]:
    """Run all jobs, whether or not one fails."""
    ended = []
    for job in jobs:
        console.rule(job.label)
        started = time.monotonic()
        failure = _run(job.command, max_seconds)
        ended.append(Ended(job.label, round(time.monotonic() - started, 1), failure))
        if failure:
            console.print(f"[bold red]{job.label} failed: {failure}[/]; going on")
    return ended


def summary(ended: Sequence[Ended]) -> dict[str, Any]:
    """The result of ``all``."""
    return {
        "benchmark": "all",
        "seconds": round(sum(one.seconds for one in ended), 1),
        "failed": [one.benchmark for one in ended if one.failure],
        "runs": [asdict(one) for one in ended],
    }


def _run(command: Sequence[str], max_seconds: float) -> str | None:
    """The failure, if any. All its processes have ended by then."""
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        status = child.wait(max_seconds)
    except subprocess.TimeoutExpired:
        return f"no end after {max_seconds:.0f} s"
    finally:
        end_session(child, signal.SIGINT)  # like Ctrl-C, so that it may clean up
    return f"exit status {status}" if status else None
