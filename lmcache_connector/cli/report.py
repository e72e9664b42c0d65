"""Output of commands: tables for people, one JSON document for programs, and errors in words.

Exit codes: 0 success, 1 a check has failed or nothing was found or removed, 2 invalid command line
or file, 3 a server cannot be reached, 130 interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

FOUND_WRONG = 1
BAD_INPUT = 2
UNREACHABLE = 3
# Wider than any table: the terminal wraps wider lines, and nothing is cut.
_WIDTH = 4096


class CliError(Exception):
    """A message for the user, a hint and the exit code."""

    def __init__(self, message: str, hint: str = "", code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code

    def as_json(self) -> dict[str, Any]:
        return {"ok": False, "error": str(self), "hint": self.hint}


@dataclass(frozen=True, slots=True)
class Report:
    """The output of a command: findings on stdout, progress and questions on stderr."""

    as_json: bool
    out: Console
    err: Console

    @classmethod
    def to_terminal(cls, as_json: bool) -> Report:
        out = Console(soft_wrap=True, width=_WIDTH, highlight=False, markup=False)
        return cls(as_json, out, Console(stderr=True, highlight=False, markup=False))

    def emit(self, document: dict[str, Any], *for_people: str | Text | Table) -> None:
        """Print ``document`` as one line of JSON or, without ``--json``, ``for_people``."""
        if self.as_json:
            self.out.file.write(json.dumps(document) + "\n")
            self.out.file.flush()
            return
        for item in for_people:
            self.out.print(harmless(item) if isinstance(item, str) else item)

    def fail(self, error: CliError) -> int:
        """Report the error and its hint on stderr or as JSON. Returns its exit code."""
        if self.as_json:
            self.emit(error.as_json())
        else:
            self.complain(error)
        return error.code

    def complain(self, error: CliError) -> None:
        """Report an error to people only."""
        self.err.print(harmless(f"Error: {error}"), style="red", soft_wrap=True)
        if error.hint:
            self.err.print(harmless(f"Try: {error.hint}"), soft_wrap=True)

    def progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        return Progress(
            *columns, TimeElapsedColumn(), console=self.err, transient=True, disable=self.as_json
        )


def harmless(text: str) -> str:
    """``text`` without control characters, with which a server's names could control a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without lines. Columns whose title ends in a space are right-aligned numbers."""
    made = Table(box=None, pad_edge=False)
    for column in columns:
        justify = "right" if column.endswith(" ") else "left"
        made.add_column(column.strip(), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*(Text(harmless(cell)) for cell in row))
    return made


def size(num_bytes: float) -> str:
    """``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float | None) -> str:
    """``3 d``, ``2.5 s``, ``0.8 ms``; a dash for ``None``."""
    if seconds is None:
        return "-"
    if seconds < 0.1:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 90:
        return f"{seconds:.3g} s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{hours:.0f} h" if hours < 48 else f"{days:.0f} d"


def span(bounds: Sequence[float | None]) -> str:
    """``2 s to 3 h``, from the least and the most; a dash if unknown."""
    low, high = map(duration, bounds)
    return low if low == high else f"{low} to {high}"
