"""The command line: ``python -m tests.simulation --help``."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import Report

_HASH_SEED = "0"
_COLLECT_EVERY = 10  # worlds


def main() -> None:
    arguments = _parse(sys.argv[1:])
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
        # Sets of strings are walked in the order of their hashes.
        os.environ["PYTHONHASHSEED"] = _HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    status = _run(arguments)
    sys.stdout.flush()
    os._exit(status)  # what vLLM and torch have loaded takes seconds to unload


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="print all that happens in it")
    parser.add_argument("--first", type=int, default=0, help="the first of several seeds")
    parser.add_argument("--seeds", type=int, help="how many, one after the other")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, without --seeds")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    parser.add_argument("--until", metavar="PATTERN", help="stop only at a failure that matches it")
    parser.add_argument("--replay", action="store_true", help="check that each seed repeats itself")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--json", type=Path, help="write what was counted into this file")
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> int:
    """The exit status: 1 if a promise was broken."""
    from tests.simulation import loading

    loading.install()
    from tests.simulation import setup

    with tempfile.TemporaryDirectory() as folder:
        model = setup.prepare(Path(folder))
        gc.collect()
        gc.freeze()
        if arguments.seed is not None:
            return _run_one(arguments, model)
        return _run_many(arguments, model)


def _run_one(arguments: argparse.Namespace, model: Path) -> int:
    from tests.simulation.world import run_world

    report = run_world(arguments.seed, model, print if arguments.trace else None)
    _print(report)
    print(f"digest {report.digest}")
    return bool(report.failures)


def _run_many(arguments: argparse.Namespace, model: Path) -> int:
    started, numbers = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for job in range(arguments.jobs):  # each runs its share of the seeds
            child = os.fork()
            if child == 0:
                Path(folder, str(job)).write_text(json.dumps(_run_share(arguments, model, job)))
                sys.stdout.flush()
                os._exit(0)
            children.append(child)
        ends = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
        for file in Path(folder).iterdir():
            numbers.update(json.loads(file.read_text()))
    _summarize(arguments, numbers, time.monotonic() - started)
    return bool(ends != {0} or numbers["failed"] or numbers["unlike"])


def _run_share(arguments: argparse.Namespace, model: Path, job: int) -> Counter[str]:
    from tests.simulation.world import run_world

    numbers, started, digests = Counter[str](), time.monotonic(), dict[int, str]()
    for seed in count(arguments.first + job, arguments.jobs):
        if arguments.seeds is None and time.monotonic() - started >= arguments.seconds:
            break
        if arguments.seeds is not None and seed >= arguments.first + arguments.seeds:
            break
        report = run_world(seed, model)
        digests[seed] = report.digest
        if len(digests) % _COLLECT_EVERY == 0:
            gc.collect()
        numbers += report.counts
        numbers.update(seeds=1, failed=bool(report.failures), seconds=round(report.seconds))
        if report.failures:
            _print(report)
        is_meant = any(re.search(arguments.until or "", failure) for failure in report.failures)
        if is_meant and not arguments.keep_going:
            break
    for seed in reversed(digests) if arguments.replay else ():
        if run_world(seed, model).digest != digests[seed]:
            numbers["unlike"] += 1
            print(f"seed {seed} does not repeat itself")
    return numbers


def _summarize(arguments: argparse.Namespace, numbers: Counter[str], seconds: float) -> None:
    print(
        f"{numbers['seeds']} seeds from {arguments.first} on, {numbers['failed']} failed: "
        f"{seconds:.1f} s, {numbers['seeds'] / seconds * 60:.0f} seeds a minute"
    )
    print(", ".join(f"{name}: {count}" for name, count in sorted(numbers.items())), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers))


def _print(report: Report) -> None:
    for failure in report.failures:
        print(f"seed {report.seed} FAILED {failure}")
    print(f"seed {report.seed}: {dict(report.counts)}")
    if report.failures:
        print(f"again: python -m tests.simulation --seed {report.seed} --trace", flush=True)
