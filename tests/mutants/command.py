"""The command line: ``python -m tests.mutants --help``."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.catalog import LIST, Mutant, StaleError, load
from tests.mutants.judge import PRELOADED, Copy, Judge, Verdict
from tests.mutants.ledger import Ledger
from tests.mutants.relevance import Imports

ROOT = Path(__file__).parents[2]
_SEEDS = 500
_ROUNDS = 3


def main(argv: Sequence[str], root: Path = ROOT, preloaded: Sequence[str] = PRELOADED) -> int:
    """The exit status: 0 if every bug was planted and found, 2 if the run cannot begin."""
    arguments = _parse(argv)
    try:
        chosen = load(root, arguments.names)
    except (TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    stale = [mutant.name for mutant in chosen if _is_stale(root, mutant)]
    mutants = [mutant for mutant in chosen if mutant.name not in stale]
    if arguments.simulation:
        mutants = [mutant for mutant in mutants if mutant.simulation]
    run = _Run(root, arguments, preloaded)
    try:
        with run.ledger.alone():
            found = {} if arguments.check else run.all(mutants)
    except BlockingIOError:
        print("another run is under way here", file=sys.stderr)
        return 2
    missed = [mutant.name for mutant in mutants if mutant.name not in found]
    if arguments.write:
        run.ledger.write_page(load(root))
    if not arguments.check:
        print(f"{len(mutants)} planted, {len(found)} found; missed: {', '.join(missed) or 'none'}")
    if stale:
        print(f"STALE, not planted, to be repaired in {LIST}: {', '.join(stale)}")
    if arguments.json:
        numbers = {"planted": len(mutants), "found": len(found)}
        line = json.dumps({**numbers, "missed": missed, "stale": stale})
        print(line) if arguments.json == "-" else Path(arguments.json).write_text(f"{line}\n")
    return bool(stale or (missed and not arguments.check))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("names", nargs="*", help="bugs, files or folders; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time, each in a copy")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for a bug")
    parser.add_argument("--json", metavar="FILE", help="one line of JSON at the end; -: to stdout")
    parser.add_argument("--write", action="store_true", help="write the table of tests/MUTANTS.md")
    parser.add_argument("--check", action="store_true", help="only say which entries are stale")
    parser.add_argument("--no-engines", action="store_true", help="leave real engines out")
    parser.add_argument(
        "--simulation", action="store_true", help="ask the simulation alone for what it must find"
    )
    return parser.parse_args(argv)


def _is_stale(root: Path, mutant: Mutant) -> bool:
    """Whether the bug cannot be planted; prints so."""
    try:
        mutant.plant((root / mutant.file).read_text())
    except (OSError, StaleError) as error:
        print(f"STALE   {mutant.name}: {error}", flush=True)
        return True
    return False


class _Run:
    """Judges bugs in several threads."""

    def __init__(self, root: Path, arguments: argparse.Namespace, preloaded: Sequence[str]) -> None:
        self._root = root
        self._preloaded = preloaded
        self._copies: list[Copy] = []
        self._arguments = arguments
        self._lock = threading.Lock()
        self._judge = Judge(Imports(root), arguments.limit, not arguments.no_engines)
        self.ledger = Ledger(root)

    def all(self, mutants: Sequence[Mutant]) -> dict[str, Verdict]:
        """Verdicts on the selected bugs, by tests that pass without them."""
        try:
            return self._all(mutants)
        finally:
            for copy in self._copies:
                copy.close()

    def _all(self, mutants: Sequence[Mutant]) -> dict[str, Verdict]:
        found = {m.name: known for m in mutants if (known := self._known(m)) is not None}
        todo = [mutant for mutant in mutants if mutant.name not in found]
        for _ in range(_ROUNDS):
            found |= self._judge_each(todo) if todo else {}
            sick = self._sick(found)
            todo = [m for m in mutants if m.name in found and found[m.name].finder in sick]
            for mutant in todo:
                print(f"AGAIN   {mutant.name}: {found.pop(mutant.name).finder} fails without it")
                self.ledger.put(mutant, None)
            if not todo:
                break
        return {name: verdict for name, verdict in found.items() if verdict.finder}

    def _known(self, mutant: Mutant) -> Verdict | None:
        return None if self._arguments.simulation else self.ledger.get(mutant)

    def _judge_each(self, todo: Sequence[Mutant]) -> dict[str, Verdict]:
        num_jobs = max(1, min(self._arguments.jobs, len(todo)))
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for i in range(num_jobs):
            free.put(self._copy(i))

        def judge(mutant: Mutant) -> tuple[str, Verdict]:
            copy = free.get()
            try:
                return mutant.name, self._verdict(mutant, copy)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(num_jobs) as pool:
            try:
                return dict(pool.map(judge, todo))
            except BaseException:  # an interrupt: tests would go on for minutes
                for copy in self._copies:
                    copy.close()
                raise

    def _copy(self, number: int) -> Copy:
        if number == len(self._copies):
            folder = self.ledger.folder / f"copy-{number}"
            self._copies.append(Copy(self._root, folder, self._preloaded))
        return self._copies[number]

    def _verdict(self, mutant: Mutant, copy: Copy) -> Verdict:
        if self._arguments.simulation:
            verdict = self._judge.find_simulated(mutant, copy, _SEEDS)
        else:
            finder = self.ledger.finders.get(mutant.name, "")
            verdict = self._judge.find(mutant, copy, finder)
            with self._lock:
                self.ledger.put(mutant, verdict)
        word, by = ("found", verdict.finder) if verdict.finder else ("MISSED", mutant.breaks)
        print(f"{word:7} {mutant.name}  {verdict.seconds:.0f} s  {by}  {verdict.how}", flush=True)
        return verdict

    def _sick(self, found: dict[str, Verdict]) -> set[str]:
        """Finders that fail without a bug."""
        new = {verdict.finder for verdict in found.values() if verdict.finder} - self.ledger.sound
        if self._arguments.simulation or not new:
            return set()
        sick = self._judge.fail_without(sorted(new), self._copy(0))
        self._judge.sick |= sick
        self.ledger.sound |= new - sick
        self.ledger.save()
        return sick
