"""The command line: ``python -m tests.simulation --help``."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import Report

_HASH_SEED = "0"


def main() -> None:
    arguments = _parse(sys.argv[1:])
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
        # Sets of strings are walked in the order of their hashes.
        os.environ["PYTHONHASHSEED"] = _HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(run(arguments))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    parser.add_argument("--first", type=int, default=0, help="the first of several seeds")
    parser.add_argument("--seeds", type=int, help="how many, one after the other")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, without --seeds")
    parser.add_argument("--mutation", help="put this bug into the product first")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 1 if a promise was broken."""
    from tests.simulation import loading

    loading.install()
    from tests.simulation import setup

    with tempfile.TemporaryDirectory() as folder:
        model = setup.prepare(Path(folder))
        if arguments.mutation:
            from tests.simulation import mutations

            mutations.apply(arguments.mutation)
        gc.collect()
        gc.freeze()
        return _run_seeds(arguments, model)


def _run_seeds(arguments: argparse.Namespace, model: Path) -> int:
    from tests.simulation.world import run_world

    if arguments.seed is not None:
        report = run_world(arguments.seed, model, print if arguments.trace else None)
        _print(report)
        print(f"digest {report.digest}; {dict(report.counts)}")
        return bool(report.failures)
    started, counts, num_failed, num_seeds = time.monotonic(), Counter[str](), 0, 0
    seed, simulated = arguments.first, 0.0
    while not _is_over(arguments, num_seeds, started):
        report = run_world(seed, model)
        seed, num_seeds = seed + 1, num_seeds + 1
        simulated += report.seconds
        counts += report.counts
        if report.failures:
            num_failed += 1
            _print(report, arguments.mutation)
            if not arguments.keep_going:
                break
    seconds = time.monotonic() - started
    print(
        f"{num_seeds} seeds from {arguments.first} on in {seconds:.1f} s "
        f"({num_seeds / seconds * 60:.0f} a minute), {simulated:.0f} s simulated, "
        f"{num_failed} failed"
    )
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return bool(num_failed)


def _is_over(arguments: argparse.Namespace, num_seeds: int, started: float) -> bool:
    if arguments.seeds is not None:
        return num_seeds >= arguments.seeds
    return time.monotonic() - started >= arguments.seconds


def _print(report: Report, mutation: str | None = None) -> None:
    more = f" --mutation {mutation}" if mutation else ""
    for failure in report.failures:
        print(f"seed {report.seed} FAILED {failure}")
    if report.failures:
        print(f"  {dict(report.counts)}")
        print(f"  again: python -m tests.simulation --seed {report.seed}{more} --trace", flush=True)
