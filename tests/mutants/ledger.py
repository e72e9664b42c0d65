"""Known verdicts: in ``.cache/mutants`` by the hash of their tree, and in `tests/MUTANTS.md` for
readers and for the next tree."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from tests.mutants.catalog import Mutant
from tests.mutants.judge import Verdict

PAGE = "tests/MUTANTS.md"
_TABLE = "| bug | kind | what it breaks | file | found by |\n|---|---|---|---|---|\n"
_HASHED = ("lmcache_connector", "storage", "tests")


class Ledger:
    """Verdicts are valid until a file of the product or its tests changes. Afterwards ``finders``,
    the last finder of each bug, run first. ``sound``: tests that pass without a bug."""

    def __init__(self, root: Path) -> None:
        self.folder = root / ".cache" / "mutants"
        self._file = self.folder / "verdicts.json"
        self._page = root / PAGE
        self._tree = _hash(root)
        self._verdicts: dict[str, tuple[str, Verdict]] = {}  # by name: its entry and verdict
        self.finders = self._read_page()
        self.sound: set[str] = set()
        kept = json.loads(self._file.read_text()) if self._file.exists() else {}
        self.finders |= kept.get("finders", {})
        if kept.get("tree") == self._tree:
            self.sound = set(kept["sound"])
            self._verdicts = {k: (d, Verdict(**v)) for k, (d, v) in kept["verdicts"].items()}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Raises ``BlockingIOError`` if another process plants bugs here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    def get(self, mutant: Mutant) -> Verdict | None:
        """The verdict of this tree and entry."""
        digest, verdict = self._verdicts.get(mutant.name, ("", None))
        return verdict if digest == mutant.digest else None

    def put(self, mutant: Mutant, verdict: Verdict | None) -> None:
        """``None``: remove it."""
        self._verdicts.pop(mutant.name, None)
        self.finders.pop(mutant.name, None)
        if verdict is not None:
            self._verdicts[mutant.name] = mutant.digest, verdict
            self.finders |= {mutant.name: verdict.finder} if verdict.finder else {}
        self.save()

    def save(self) -> None:
        verdicts = {name: (digest, asdict(each)) for name, (digest, each) in self._verdicts.items()}
        kept = {"tree": self._tree, "finders": self.finders, "sound": sorted(self.sound)}
        draft = self._file.with_suffix(".part")
        draft.write_text(json.dumps({**kept, "verdicts": verdicts}, indent=1))
        draft.replace(self._file)

    def write_page(self, mutants: Sequence[Mutant]) -> None:
        """Write the page's table: the last finder of each bug."""
        rows = []
        for m in mutants:
            verdict, finder = self.get(m), self.finders.get(m.name, "")
            by = f"`{finder}`" if finder else "**nobody**" if verdict is not None else "not asked"
            rows.append(f"| `{m.name}` | {m.kind} | {m.breaks} | `{m.file}` | {by} |\n")
        head = self._page.read_text().partition(_TABLE)[0] if self._page.exists() else "# Bugs\n\n"
        self._page.write_text(head + _TABLE + "".join(rows))

    def _read_page(self) -> dict[str, str]:
        table = self._page.read_text().partition(_TABLE)[2] if self._page.exists() else ""
        rows = [line.strip("|").split(" | ") for line in table.splitlines()]
        cells = [[cell.strip(" `") for cell in row] for row in rows]
        return {r[0]: r[-1] for r in cells if r[-1].startswith(("tests/", "the simulation"))}


def _hash(root: Path) -> str:
    hasher = sha256()
    for top in _HASHED:
        for file in sorted((root / top).rglob("*.py")):
            if "mutants" not in file.parts:
                hasher.update(f"{file.relative_to(root)}\0".encode())
                hasher.update(sha256(file.read_bytes()).digest())
    return hasher.hexdigest()
