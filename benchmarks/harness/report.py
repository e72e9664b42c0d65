"""Writes ``RESULTS.md`` and its plots from the results kept, and from nothing else.

Plain fields of a benchmark become one table with a column per variant, or with a row per variant
where there are many; lists of objects become tables of their own. What people have to say about a
benchmark stands in ``notes.md`` under its name and comes before the tables. Plots are drawn by the
benchmarks' own ``draw``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.harness.app import BENCHMARKS, benchmark_module
from benchmarks.harness.results import FOLDER, Kept, all_kept

TARGET = FOLDER.parent / "RESULTS.md"
NOTES = FOLDER.parent / "notes.md"
_MAX_COLUMNS = 3
_SURROUNDINGS = ("benchmark", "measured", "machine", "versions")


def main(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks report").parse_args(argv)
    write_report(FOLDER, NOTES, TARGET)
    return 0


def write_report(folder: Path, notes: Path, target: Path) -> None:
    """Render the results in ``folder`` to ``target``. Plots are written to ``folder`` as well."""
    kept = all_kept(folder)
    for one in kept:
        _draw(one, folder)
    pictures = sorted(folder.glob("*.png"))
    target.write_text(
        render(kept, _sections(notes.read_text(encoding="utf-8")), pictures), encoding="utf-8"
    )


def render(kept: Sequence[Kept], notes: Mapping[str, str], pictures: Sequence[Path]) -> str:
    """The page. ``notes``: text by benchmark; what opens the page is under ``""``."""
    parts = [notes.get("", "# Results")]
    for name, group in groupby(kept, key=lambda one: one.name):
        variants = list(group)
        parts += [f"## {name}", f"`python -m benchmarks {name}`: {BENCHMARKS.get(name, name)}."]
        parts += [notes[name]] if name in notes else []
        parts.append(_table(_plain_rows(variants)))
        for one in variants:
            parts += _lists(one)
            shown = [p for p in pictures if p.stem == one.label]
            parts += [f"![{one.label}](results/{path.name})" for path in shown]
        parts += _surroundings(variants)
    return "\n\n".join(parts) + "\n"


def _draw(one: Kept, folder: Path) -> None:
    if one.name not in BENCHMARKS:
        return
    draw = getattr(benchmark_module(one.name), "draw", None)
    if draw is not None:
        draw(one.result, folder / f"{one.label}.png")


def _sections(text: str) -> dict[str, str]:
    """The text under each ``## NAME``, by name; what comes before the first under ``""``."""
    first, *rest = re.split(r"^## +", text, flags=re.MULTILINE)
    parts = (part.partition("\n") for part in rest)
    return {"": first.strip()} | {name.strip(): body.strip() for name, _, body in parts}


# -- tables --------------------------------------------------------------------------------------


def _plain_rows(variants: Sequence[Kept]) -> list[dict[str, Any]]:
    columns = {one.variant or one.name: dict(_plain(one.result)) for one in variants}
    if len(columns) > _MAX_COLUMNS:
        return [{"": name} | fields for name, fields in columns.items()]
    fields = dict.fromkeys(field for column in columns.values() for field in column)
    return [
        {"": field} | {name: column.get(field) for name, column in columns.items()}
        for field in fields
    ]


def _plain(result: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Fields with one value each. The fields of a nested object get its name as a prefix."""
    for field, value in result.items():
        if field in _SURROUNDINGS and not prefix:
            continue
        if isinstance(value, Mapping):
            yield from _plain(value, f"{prefix}{field}.")
        elif not _is_table(value):
            yield prefix + field, value


def _lists(one: Kept) -> list[str]:
    parts = []
    for field, value in one.result.items():
        if _is_table(value):
            parts += [f"**{one.label}: {field}**", _table([dict(_plain(row)) for row in value])]
    return parts


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1000:
        return str(int(value))
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


def _surroundings(variants: Sequence[Kept]) -> list[str]:
    """Machine, versions and date of each variant; a single line if they are the same for all."""
    lines: dict[str, list[str]] = {}
    for one in variants:
        lines.setdefault(_surrounding(one.result), []).append(one.variant or one.name)
    if len(lines) == 1:
        return [f"<sub>{line}</sub>" for line in lines]
    return [f"<sub>{', '.join(names)}: {line}</sub>" for line, names in lines.items()]


def _surrounding(result: Mapping[str, Any]) -> str:
    machine, versions = result.get("machine", {}), result.get("versions", {})
    measured = result.get("measured", {})
    words = [f"{machine.get('cores')} cores of {machine.get('cpu')}"]
    if "memory_gib" in machine:
        words.append(f"{machine['memory_gib']} GiB")
    words += [str(machine.get("platform")), f"Python {machine.get('python')}"]
    words += [f"{name} {number}" for name, number in versions.items()]
    if measured:
        words.append(f"measured on {measured['on']}")
    return ", ".join(words) + "."
