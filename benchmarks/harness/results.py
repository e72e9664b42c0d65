"""Kept results: ``benchmarks/results/NAME.json``, or ``NAME-VARIANT.json``.

Each file has exactly the object that a benchmark writes with ``--json``: a file of ``--json PATH``
may be copied there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT

FOLDER = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Kept:
    """One kept result. ``variant`` is empty for a run without special arguments."""

    name: str
    variant: str
    result: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name


def keep(result: Mapping[str, Any], variant: str = "", folder: Path = FOLDER) -> Path:
    """Write ``result`` under its name. ``variant``: see :func:`variant_name`."""
    label = Kept(result["benchmark"], variant, result).label
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{label}.json"
    path.write_text(to_line(result) + "\n", encoding="utf-8")
    return path


def variant_name(text: str) -> str:
    """``text``, if it may be part of a file's name. Raises ``ValueError`` otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9.-]*", text):
        raise ValueError(f"a variant is made of letters, digits, '.' and '-', not {text!r}")
    return text


def all_kept(folder: Path = FOLDER) -> list[Kept]:
    """All results, sorted by file name. Raises ``ValueError`` for a file that is none."""
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def to_line(result: Mapping[str, Any]) -> str:
    """The object as one line of JSON."""
    return json.dumps(result)


def _read(path: Path) -> Kept:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        name = result["benchmark"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no result of a benchmark: {error}") from error
    label, _, variant = path.stem.removeprefix(name).partition("-")
    if label or not path.stem.startswith(name):
        raise ValueError(f"{path} holds a result of {name}, so its name must begin with that")
    return Kept(name, variant, result)
