"""Surfaces of versions, kept as JSON: the classes and functions that our tables name, in full.

A table may ask for another member of such a class without the files being made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.contract import Found, Surface, Use

FOLDER = Path(__file__).parent / "surfaces"


@dataclass(frozen=True)
class KeptSurface:
    """One version of a package. ``names``: by module and name, and ``None`` for what is absent."""

    package: str
    version: str
    names: dict[str, Any]

    def surface(self, module: str, name: str) -> Found | None:
        """Raises ``KeyError`` for a name that no table had when the file was made."""
        owner, _, method = name.partition(".")
        key = f"{module}:{owner}"
        if key not in self.names:
            raise KeyError(f"{key} is not in the file of {self.package} {self.version} yet")
        data = self.names[key]
        if data is None or (method and method not in data["methods"]):
            return None
        return _found(data["methods"][method] if method else data)


def read(file: Path) -> KeptSurface:
    return KeptSurface(**json.loads(file.read_text()))


def write(package: str, version: str, table: Iterable[Use], surface: Surface) -> Path:
    """Keep what ``surface`` has of the names in ``table``."""
    owners = sorted({(use.module, use.name.partition(".")[0]) for use in table})
    lines = [f'  "{module}:{name}": {_text(surface, module, name)}' for module, name in owners]
    file = FOLDER / f"{package}-{version}.json"
    file.write_text(
        f'{{\n "package": "{package}",\n "version": "{version}",\n "names": {{\n'
        + ",\n".join(lines)
        + "\n }\n}\n"
    )
    return file


def versions(package: str) -> list[Path]:
    """The files of a package's versions."""
    return sorted(FOLDER.glob(f"{package}-*.json"))


def _text(surface: Surface, module: str, name: str) -> str:
    found = surface(module, name)
    if found is None:
        return "null"
    data = _data(found)
    if found.parameters is None and found.members:
        data["methods"] = {
            member: _data(method)
            for member in sorted(found.members)
            if (method := surface(module, f"{name}.{member}")) is not None
        }
    return json.dumps(data)


def _data(found: Found) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if found.parameters is not None:
        data["parameters"] = [
            name if is_needed else f"{name}=" for name, is_needed in found.parameters
        ]
    if found.takes_any:
        data["takes_any"] = True
    if found.members:
        data["members"] = sorted(found.members)
    if found.abstract:
        data["abstract"] = sorted(found.abstract)
    return data


def _found(data: dict[str, Any]) -> Found:
    names = data.get("parameters")
    return Found(
        parameters=(
            tuple((name.removesuffix("="), not name.endswith("=")) for name in names)
            if names is not None
            else None
        ),
        takes_any=data.get("takes_any", False),
        members=frozenset(data.get("members", ())),
        abstract=frozenset(data.get("abstract", ())),
    )
