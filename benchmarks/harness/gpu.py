"""``gpu``: all measurements that need a CUDA GPU, in one call and without a network.

It needs torch, Triton, NumPy, pytest and ``requirements-gpu.txt``. The stages: tests of copies and
streams; with LMCache, tests of transformers; with vLLM for CUDA, engine tests, ``ttft`` and
``overhead``; copies in every layout; the storms of ``simulated-gpu`` on the GPU, if vLLM and
LMCache are installed (vLLM's scheduler runs, but none of its kernels); the tests under
compute-sanitizer, if it is installed. One folder gets a log of each stage, results as ``--json``
writes them, and ``summary.json`` with hardware and versions, rewritten after each stage. For a
machine that is lent for some minutes at a time, ``--minutes`` ends in time and ``--resume``
continues.

``--rehearse`` does the same without a GPU: the CUDA copier's own code runs, with host memory as
device memory and Triton's interpreter as compiler. Its speeds mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.copy import LAYOUTS
from benchmarks.harness.app import emit
from benchmarks.harness.machine import surroundings
from tests.support import ROOT
from tests.support.processes import end_session

_FOLDER = "tests/copy_kv_blocks"
_PYTEST = ("-m", "pytest", "-c", f"{_FOLDER}/gpu.ini")
_TESTS = (*_PYTEST, "-m", "cuda", _FOLDER)
_FEW_TESTS = ("-k", "mla or loading or groups or fence or pinned")
_BLOCK_SIZES = (16, 128)
_ENGINE_TESTS = ("tiers", "in_step", "names", "failures", "weights", "peers", "drafters")
_NOT_OF_CPUS = "not cores and not forked"  # a GPU's context does not survive a fork
_OUT_OF_TIME = "out of time"
_ENDING_SECONDS = 25.0  # for a stage that is stopped
_SANITIZER = "compute-sanitizer"
_SANITIZER_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


@dataclass(frozen=True)
class Stage:
    """One child process; ``command`` follows the interpreter. ``before``: a tool that runs it.
    ``missing``: why it cannot run here."""

    name: str
    command: tuple[str, ...]
    seconds: float
    before: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    missing: str | None = None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    parser.add_argument("--out", type=Path, help="folder of the results (build/gpu)")
    parser.add_argument("--json", metavar="PATH|-", help="where the summary goes too; - is stdout")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end within that time")
    parser.add_argument("--resume", action="store_true", help="leave out what has been run")
    args = parser.parse_args(argv)
    until = time.monotonic() + 60 * args.minutes - _ENDING_SECONDS
    signal.signal(signal.SIGTERM, _end)
    folder = args.out or ROOT / "build" / ("gpu-rehearsal" if args.rehearse else "gpu")
    folder = folder.absolute()  # stages run in the repository's folder
    before = _known(folder) if args.resume else _clear(folder)
    cut_off = {one["stage"] for one in before if one["ended"] == _OUT_OF_TIME}
    ended = [one for one in before if one["stage"] not in cut_off]
    (folder / "results").mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    summary = {"benchmark": "gpu", "rehearsed": args.rehearse, "stages": ended, **surroundings()}
    stages = all_stages(folder, is_rehearsal=args.rehearse)
    for stage in sorted(stages, key=lambda stage: stage.name in cut_off):
        if stage.name not in (one["stage"] for one in ended):
            ended.append(_run(stage, folder, console, until - time.monotonic()))
            emit(summary, str(folder / "summary.part"))
            (folder / "summary.part").replace(folder / "summary.json")
    emit(summary, args.json)
    console.print(f"Results: {folder}")
    return int(any(one["ended"] not in ("well", "left out") for one in ended))


def _end(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def _known(folder: Path) -> list[dict[str, Any]]:
    """Results of earlier stages, by the summary."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [one for one in summary["stages"] if one["ended"] != "left out"]


def _clear(folder: Path) -> list[dict[str, Any]]:
    """Remove the files of an earlier call, and nothing else. Returns no stages."""
    for path in (folder / "summary.json", *folder.glob("*.log")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "results", ignore_errors=True)
    return []


def all_stages(folder: Path, *, is_rehearsal: bool) -> Iterator[Stage]:
    """Most valuable first, in case the machine is taken away early."""
    environment = {"TRITON_INTERPRET": "1"} if is_rehearsal else {"REQUIRE_CUDA": "1"}
    yield Stage("tests", _TESTS, 900.0, environment=environment)
    if not is_rehearsal:
        yield Stage(
            "transformers-tests",
            (*_PYTEST, "--confcutdir=tests", "-k", _NOT_OF_CPUS, "tests/transformers"),
            600.0,
            environment=environment,
            missing=_absent("lmcache", "transformers"),
        )
        yield from _engines(folder, environment)
    yield from _copies(folder, environment, is_rehearsal=is_rehearsal)
    yield _storms(folder, environment, is_rehearsal=is_rehearsal)
    sanitizer = _find_sanitizer()
    # Some calls of the tests and torch fail on purpose.
    options = ("--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no")
    before = (sanitizer, *options) if sanitizer else ()
    yield Stage(
        "sanitizer",
        (*_TESTS, *_FEW_TESTS),
        600.0,
        before=() if is_rehearsal else before,
        # Otherwise accesses outside of a tensor would not be seen.
        environment=environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        missing=None if sanitizer or is_rehearsal else f"{_SANITIZER} is not installed",
    )


def _copies(folder: Path, environment: dict[str, str], *, is_rehearsal: bool) -> Iterator[Stage]:
    """All layouts and block sizes; in a rehearsal, one block size."""
    size = ("--mib", "1", "--layers", "2", "--repeats", "1") if is_rehearsal else ()
    device = "rehearsed" if is_rehearsal else "cuda"
    for layout in LAYOUTS:
        for block_size in _BLOCK_SIZES[:1] if is_rehearsal else _BLOCK_SIZES:
            label = f"copy-cuda-{layout}-{block_size}"
            command = ["-m", "benchmarks", "copy", "--device", device, *size]
            command += ["--layout", layout, "--block-size", str(block_size)]
            command += ["--json", str(folder / "results" / f"{label}.json")]
            yield Stage(label, tuple(command), 120.0, environment=environment)


def _engines(folder: Path, environment: dict[str, str]) -> Iterator[Stage]:
    """vLLM's real engine: hits compared byte for byte; and of a model with the shape of Llama 3.1
    8B, times to a first token and the cost of a connector without hits."""
    missing: str | None = "vLLM for CUDA is not installed"
    with suppress(PackageNotFoundError):
        missing = None if version("vllm") else missing
    if not entry_points(group="vllm.general_plugins", name="lmcache_connector"):
        missing = missing or "this package is not installed"
    if importlib.util.find_spec("flashinfer") is None:
        environment = environment | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    tests = (f"tests/engine/test_{name}.py" for name in _ENGINE_TESTS)
    yield Stage(
        "engine-tests",
        (*_PYTEST, "--confcutdir=tests", "-m", "not soak", "-k", "not two", *tests),
        600.0,
        environment=environment,
        missing=missing,
    )
    figures = {
        "ttft-8b": "ttft --models 8b --rounds 5",
        "overhead-8b": "overhead --model 8b --launches 1",
    }
    for label, arguments in figures.items():
        result = ("--json", str(folder / "results" / f"{label}.json"))
        command = ("-m", "benchmarks", *arguments.split(), *result)
        yield Stage(label, command, 600.0, environment=environment, missing=missing)


def _storms(folder: Path, environment: dict[str, str], *, is_rehearsal: bool) -> Stage:
    """About eight minutes on a GPU; a rehearsal has a few requests."""
    size = "--rounds 2 --step-ms 10 100 --hits 512 2048 8192"
    if is_rehearsal:
        size = "--rounds 1 --step-ms 10 --hits 128 512 --no-storms"
    command = ("-m", "benchmarks", "simulated-gpu", *size.split())
    device = "rehearsed" if is_rehearsal else "cuda"
    return Stage(
        "storms-cuda",
        (*command, "--device", device, "--json", str(folder / "results" / "storms-cuda.json")),
        900.0,
        environment=environment,
        missing=_absent("vllm", "lmcache"),
    )


def _absent(*packages: str) -> str | None:
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def _find_sanitizer() -> str | None:
    path = os.pathsep.join((os.environ.get("PATH", ""), *_SANITIZER_FOLDERS))
    return shutil.which(_SANITIZER, path=path)


def _run(stage: Stage, folder: Path, console: Console, seconds_left: float) -> dict[str, Any]:
    """A stage's result. All its processes have ended by then."""
    missing = stage.missing or ("no time left" if seconds_left <= 0 else None)
    if missing is not None:
        console.print(f"{stage.name}, left out, {missing}", markup=False, soft_wrap=True)
        return {"stage": stage.name, "ended": "left out", "why": missing}
    limit = min(stage.seconds, seconds_left)
    started, log = time.monotonic(), folder / f"{stage.name}.log"
    command = (*stage.before, sys.executable, *stage.command)
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | stage.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(limit)
            ended = f"with exit status {status}" if status else "well"
        except subprocess.TimeoutExpired:
            ended = f"not within {limit:.0f} s" if limit == stage.seconds else _OUT_OF_TIME
        finally:
            end_session(child, signal.SIGINT)
    found = {"stage": stage.name, "ended": ended, "seconds": round(time.monotonic() - started, 1)}
    if ended != "well":
        found["why"] = _last_line(log)
    console.print(", ".join(map(str, found.values())), markup=False, soft_wrap=True)
    return found


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next(
        (line.strip()[-300:] for line in reversed(lines) if line.strip()), "its log is empty"
    )
