"""Runs tests against one planted bug, in a copy of the tree.

First tests that the list names, the file's mirror, and tests that import it; the simulation; then
the mirror's folder and all tests that import the file indirectly; real engines last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import cache_from_source
from pathlib import Path

from tests.mutants.catalog import Mutant
from tests.mutants.relevance import Imports, mirror

_LEFT_OUT = (".git", ".venv", ".cache", ".hypothesis", "build", "dist", "__pycache__")
_QUICK = "not engine and not soak and not cuda"
_TEST_SECONDS = 90  # for one test; the suite's own limit is longer than a bug deserves
_SIMULATION_SECONDS = 45.0
_START_SECONDS = 120.0
_SIMULATION = "the simulation"
_ENGINES = ("tests/engine/test_tiers.py", "tests/engine/test_sharing.py")
_P2P_ENGINES = ("tests/transfers/test_transfers.py",)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - (.*))?$", re.MULTILINE)
_SEED = re.compile(r"^seed (\d+) FAILED (.*)$", re.MULTILINE)
PRELOADED = (
    "torch",
    "vllm.v1.core.sched.scheduler",
    "lmcache.v1.cache_engine",
    "hypothesis",
    "_pytest.main",
)


@dataclass(frozen=True)
class Verdict:
    """``finder``: the test, or the simulation's seed; empty if the bug was not found. ``how``: the
    failure's message. ``seconds``: since the bug was planted."""

    finder: str = ""
    how: str = ""
    seconds: float = 0.0


class Copy:
    """A copy of the tree for bugs, and a process that runs its tests, which has imported
    ``preloaded``. Used by one thread."""

    def __init__(self, root: Path, folder: Path, preloaded: Sequence[str] = PRELOADED) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(
            root,
            folder,
            symlinks=True,
            ignore=shutil.ignore_patterns(*_LEFT_OUT, "*.egg-info", "*_cache"),
        )
        self._output = folder.with_suffix(".output")
        self._running = 0
        self._host = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("host.py")), *preloaded],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The copy with the bug, inside the context. Raises `StaleError`."""
        file = self.folder / mutant.file
        text = file.read_text()
        self._write(file, mutant.plant(text))
        try:
            yield
        finally:
            self._write(file, text)

    def run(
        self, module: str, arguments: Sequence[str], seconds: float, *, anew: bool = False
    ) -> tuple[str, int]:
        """Output and exit status, which is negative after ``seconds``."""
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        self._output.write_text("")
        job = {"folder": str(self.folder), "module": module, "arguments": list(arguments)}
        print(json.dumps({**job, "output": str(self._output), "anew": anew}), file=self._host.stdin)
        self._host.stdin.flush()
        self._running = int(self._host.stdout.readline())
        timer = threading.Timer(max(1.0, seconds), self._kill)
        timer.start()
        try:
            code = int(self._host.stdout.readline())
        finally:
            timer.cancel()
            self._running = 0
        return self._output.read_text(errors="replace"), code

    def close(self) -> None:
        """End all runs, current and later. May be called from any thread."""
        self._host.kill()
        self._kill()
        self._host.wait()

    def _kill(self) -> None:
        if self._running:
            with suppress(ProcessLookupError):
                os.killpg(self._running, signal.SIGKILL)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        Path(cache_from_source(str(file))).unlink(missing_ok=True)


@dataclass
class Judge:
    """``sick``: tests that fail without any bug; they find none. ``limit``: seconds for a bug."""

    imports: Imports
    limit: float
    with_engines: bool = True
    sick: set[str] = field(default_factory=set)

    def find(self, mutant: Mutant, copy: Copy, known: str) -> Verdict:
        """``known``: its finder in another tree, which runs first. Raises `StaleError`."""
        started, found = time.monotonic(), Verdict()

        def left() -> float:
            return self.limit - (time.monotonic() - started)

        with copy.planted(mutant):
            for found in self._ask(mutant, copy, known, left):
                if found.finder or left() <= 0.0:
                    break
        return replace(found, seconds=round(time.monotonic() - started, 1))

    def find_simulated(self, mutant: Mutant, copy: Copy, num_seeds: int) -> Verdict:
        """By the simulation alone, whose failure must match the mutant's pattern."""
        started = time.monotonic()
        with copy.planted(mutant):
            more = ["--seeds", str(num_seeds), "--until", mutant.simulation]
            found = self._simulate(copy, more, self.limit, mutant.simulation)
        return replace(found, seconds=round(time.monotonic() - started, 1))

    def fail_without(self, finders: Sequence[str], copy: Copy) -> set[str]:
        """The finders that fail without a bug."""
        tests = sorted({finder for finder in finders if finder.startswith("tests/")})
        sick = set()
        if tests:
            output, _ = self._pytest(copy, tests, 60.0 + 30.0 * len(tests), ["-m", "not soak"])
            sick = {test for test, _ in _FAILED.findall(output)}
        if simulated := {finder for finder in finders if finder.startswith(_SIMULATION)}:
            seeds = map(int, re.findall(r"seed (\d+)", " ".join(simulated)))
            if self._simulate(copy, ["--seeds", str(1 + max(seeds, default=0))], 900.0).finder:
                sick |= simulated
        return sick

    def _ask(
        self, mutant: Mutant, copy: Copy, known: str, left: Callable[[], float]
    ) -> Iterator[Verdict]:
        def there(*tests: str) -> list[str]:
            return [test for test in tests if (copy.folder / test.split("::")[0]).exists()]

        if known and known not in self.sick:
            yield self._test(copy, there(known), left(), "not soak")
        own, module = mirror(mutant.file), mutant.module
        yield self._test(copy, there(*mutant.tests, str(own)), left())
        yield self._test(copy, self.imports.tests_of(module, directly=True), left())
        if self.imports.is_simulated(module):
            seconds = str(min(_SIMULATION_SECONDS, left()))
            limit = _SIMULATION_SECONDS + _START_SECONDS
            yield self._simulate(copy, ["--seconds", seconds], limit)
        far = self.imports.tests_of(module)
        yield self._test(copy, there(str(own.parent), *far), left())
        if self.with_engines:
            is_transfer = mutant.file.endswith(("transfers.py", "routing.py"))
            usual = _P2P_ENGINES if is_transfer else _ENGINES
            yield self._test(copy, there(*mutant.tests, *usual), left(), "engine")

    def _test(self, copy: Copy, tests: Sequence[str], left: float, marks: str = _QUICK) -> Verdict:
        """The first of the tests that fails."""
        if marks == _QUICK:
            tests = [test for test in tests if not test.startswith("tests/engine/")]
        if not tests or left <= 0.0:
            return Verdict()
        output, code = self._pytest(copy, tests, left, ["-x", "-m", marks])
        if failures := _FAILED.findall(output):
            return Verdict(*failures[0])
        is_hung = code < 0 and " passed" in output
        return Verdict(tests[0], "its process does not end") if is_hung else Verdict()

    def _pytest(
        self, copy: Copy, tests: Sequence[str], seconds: float, more: Sequence[str]
    ) -> tuple[str, int]:
        # Under load a test may be too slow: it has to fail twice.
        options = ["-q", "-p", "no:cacheprovider", "--tb=line", "--reruns=1"]
        options += [f"--timeout={_TEST_SECONDS}", *(f"--deselect={test}" for test in self.sick)]
        anew = any(
            test.startswith("tests/engine/") for test in tests
        )  # engines need a clean interpreter
        return copy.run("pytest", [*options, *more, *tests], seconds, anew=anew)

    def _simulate(self, copy: Copy, more: Sequence[str], seconds: float, says: str = "") -> Verdict:
        output, code = copy.run("tests.simulation", ["--first", "0", *more], seconds)
        for seed, how in _SEED.findall(output):
            if re.search(says, how):
                return Verdict(f"{_SIMULATION}, seed {seed}", how)
        if code in (0, -signal.SIGKILL) or says:
            return Verdict()
        return Verdict(_SIMULATION, (output.strip().splitlines() or ["it crashed"])[-1])
