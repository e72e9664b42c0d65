"""Writes ``RESULTS.md``, a page per benchmark and the plots from the kept results.

``notes.md`` begins with the template of ``RESULTS.md``: ``{{LABEL/FIELD/... FORMAT}}`` is a figure
of a result. Notes on each benchmark follow under its name, and precede its tables in
``results/NAME.md``. Plain fields become one table, with a column per variant, or a row per variant
if there are many; lists of objects become tables of their own.
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
_MAX_ROWS = 40
_SURROUNDINGS = ("benchmark", "measured", "machine", "versions")


def main(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks report").parse_args(argv)
    write_report(FOLDER, NOTES, TARGET)
    return 0


def write_report(folder: Path, notes: Path, target: Path) -> None:
    """Render the results in ``folder`` to ``target``, and pages and plots to ``folder``."""
    kept = all_kept(folder)
    for one in kept:
        draw = getattr(benchmark_module(one.name), "draw", None) if one.name in BENCHMARKS else None
        if draw is not None:
            draw(one.result, folder / f"{one.label}.png")
    text = notes.read_text(encoding="utf-8")
    for path, page in render(kept, text, folder, target).items():
        path.write_text(page, encoding="utf-8")


def render(kept: Sequence[Kept], notes: str, folder: Path, target: Path) -> dict[Path, str]:
    """Each page by its path. Raises ``ValueError`` for a figure without a result."""
    summary, _, rest = notes.partition("<!-- benchmarks -->")
    sections = re.split(r"^## +(.+)\n", rest, flags=re.MULTILINE)[1:]
    said = dict(zip(sections[::2], sections[1::2], strict=True))
    results = {one.label: one.result for one in kept}
    figure = re.compile(r"\{\{([^ }]+) ?([^}]*)\}\}")
    index = "## All benchmarks\n"
    pages = {}
    for name, group in groupby(kept, key=lambda one: one.name):
        variants = list(group)
        what = BENCHMARKS.get(name, name)
        index += f"\n- [{name}]({folder.name}/{name}.md): {what}"
        parts = [f"# {name}", f"`python -m benchmarks {name}`: {what}.", said.get(name, "").strip()]
        parts.append(_table(_plain_rows(variants)))
        for one in variants:
            parts += _lists(one)
            if (folder / f"{one.label}.png").exists():
                parts.append(f"![{one.label}]({one.label}.png)")
        parts += _surroundings(variants)
        pages[folder / f"{name}.md"] = "\n\n".join(filter(None, parts)) + "\n"
    filled = figure.sub(lambda found: _figure(results, *found.groups()), summary.strip())
    return {target: f"{filled}\n\n{index}\n", **pages}


def _figure(results: Mapping[str, Any], path: str, form: str) -> str:
    """The value at ``path``: fields, or ``FIELD=VALUE&...`` for a row. ``form``: ``ms`` shows
    seconds as milliseconds; other forms are :func:`format`'s."""
    value: Any = results
    try:
        for step in path.split("/"):
            wanted = dict(part.split("=") for part in step.split("&")) if "=" in step else None
            value = (
                value[step]
                if wanted is None
                else next(row for row in value if wanted.items() <= _words(row).items())
            )
    except (KeyError, StopIteration):
        raise ValueError(f"no result has {path}") from None
    if form == "ms":
        return f"{1000 * value:,.0f}"
    return ", ".join(value) if isinstance(value, list) else format(value, form)


def _words(row: Mapping[str, Any]) -> dict[str, str]:
    return {field: str(value).removesuffix(".0") for field, value in row.items()}


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
    """Fields with one value each. Fields of a nested object get its name as a prefix."""
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
            rows = [dict(_plain(row)) for row in value]
            long = f"{len(rows)} rows, in [{one.label}.json]({one.label}.json)"
            parts += [f"**{one.label}: {field}**", long if len(rows) > _MAX_ROWS else _table(rows)]
    return parts


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if len(columns) < 2:  # only the variants' names
        return ""
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
    """Machine, versions and date of each variant; one line if they are all the same."""
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
