"""The list of bugs."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

LIST = "tests/mutants/mutants.toml"
KINDS = ("fix", "promise", "slip")


class StaleError(Exception):
    """The bug's text is no longer in the product."""


@dataclass(frozen=True)
class Mutant:
    """In ``file``, ``old`` becomes ``new``, which breaks the behaviour ``breaks``.

    ``tests`` run first. ``simulation``: a pattern of the failure by which the simulation alone must
    find the bug; empty if it need not.
    """

    name: str
    kind: str
    file: str
    breaks: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    simulation: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.old == self.new or "|" in self.breaks:
            raise ValueError(f"{LIST}: {self.name} is no entry")

    @property
    def module(self) -> str:
        """Its import path. ``storage/`` is installed inside the package."""
        path = self.file.removesuffix(".py").removesuffix("/__init__")
        is_inside = path.startswith("lmcache_connector")
        return (path if is_inside else f"lmcache_connector/{path}").replace("/", ".")

    @property
    def digest(self) -> str:
        return sha256(repr(self).encode()).hexdigest()

    def plant(self, text: str) -> str:
        """``text`` with the bug. Raises `StaleError`."""
        if (count := text.count(self.old)) != 1:
            raise StaleError(f"its old text occurs {count} times in {self.file}")
        planted = text.replace(self.old, self.new)
        try:
            compile(planted, self.file, "exec")
        except SyntaxError as error:
            raise StaleError(f"{self.file} is no Python with it: {error}") from error
        return planted

    def is_meant_by(self, word: str) -> bool:
        """Whether ``word`` is its name, its file, or a folder that has the file."""
        folder = word.rstrip("/") + "/"
        inside = self.file.startswith((folder, f"lmcache_connector/{folder}"))
        return inside or word in (self.name, self.file)


def load(root: Path, words: Sequence[str] = ()) -> list[Mutant]:
    """The bugs that the words select; all without words. Raises ``ValueError`` or ``TypeError`` for
    a malformed entry and for a word that selects none."""
    entries = tomllib.loads((root / LIST).read_text())
    mutants = [
        Mutant(name=name, **{**entry, "tests": tuple(entry.get("tests", ()))})
        for name, entry in entries.items()
    ]
    for word in words:
        if not any(mutant.is_meant_by(word) for mutant in mutants):
            raise ValueError(f"no bug has the name or folder {word!r}")
    return [m for m in mutants if not words or any(map(m.is_meant_by, words))]
