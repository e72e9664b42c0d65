"""How commands speak: tables for people, one JSON document for programs, and errors in words.

Exit codes: 0 all well, 1 something was found to be wrong, 2 the command line or a file cannot be
used, 3 a server cannot be reached.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

FOUND_WRONG = 1
BAD_INPUT = 2
UNREACHABLE = 3


class CliError(Exception):
    """A message for the user, what to do about it, and the exit code."""

    def __init__(self, message: str, hint: str = "", code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code

    def as_json(self) -> dict[str, Any]:
        return {"ok": False, "error": str(self), "hint": self.hint}


@dataclass(frozen=True, slots=True)
class Report:
    """Where a command's findings go: stdout; progress and questions go to stderr."""

    as_json: bool
    out: Console
    err: Console

    @classmethod
    def to_terminal(cls, as_json: bool) -> Report:
        return cls(as_json, Console(soft_wrap=True), Console(stderr=True, soft_wrap=True))

    def emit(self, document: dict[str, Any]) -> None:
        """One line of JSON, for programs."""
        self.out.file.write(json.dumps(document) + "\n")
        self.out.file.flush()

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """For people; see :func:`plain_table`."""
        self.out.print(plain_table(columns, rows))

    def say(self, text: str) -> None:
        """A line for people."""
        self.out.print(harmless(text), highlight=False, markup=False)

    def complain(self, error: CliError) -> None:
        """An error for people, and what to do about it."""
        text = harmless(f"Error: {error}")
        self.err.print(text, style="red", highlight=False, markup=False)
        if error.hint:
            self.err.print(harmless(f"Try: {error.hint}"), highlight=False, markup=False)


def harmless(text: str) -> str:
    """``text`` as a terminal may show it: what servers and their keys say could command one."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without lines. Columns whose title ends in a space are numbers, set right."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left")
    for row in rows:
        table.add_row(*(Text(harmless(cell)) for cell in row))
    return table


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


def span(values: Sequence[float | None]) -> str:
    """``2 s to 3 h``: the least and the most of what is known; a dash for nothing."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    low, high = duration(known[0]), duration(known[-1])
    return low if low == high else f"{low} to {high}"
