"""A tool's interface to the matrix: a command line for a server, and a reader of its output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

from tests.support import ROOT

ENVIRONMENTS = ROOT / ".cache" / "field"
"""``make field`` puts environments of tools here that are no dependency."""


@dataclass(frozen=True)
class Load:
    """``num_contexts`` of ``context_tokens`` are a few times the paged cache of ``paged_tokens``.
    Traces are made ``trace_scale`` times shorter."""

    paged_tokens: int
    max_model_len: int
    context_tokens: int
    num_contexts: int
    trace_scale: int
    suffix_tokens: int = 64
    output_tokens: int = 16
    concurrency: int = 2
    asks_per_context: int = 3


@dataclass(frozen=True)
class Target:
    """A tool's view of a server. ``folder`` is for the tool's output."""

    address: str
    model_name: str
    tokenizer: Path
    load: Load
    folder: Path

    @property
    def url(self) -> str:
        return f"http://{self.address}"


class Tool(Protocol):
    """``figures`` have the names of :data:`benchmarks.field.table.MEASURES` where they mean the
    same, and the tool's own names otherwise."""

    name: str

    def version(self) -> str | None:
        """``None`` if it is not installed."""

    def command(self, target: Target) -> list[str]:
        """Raises ``ValueError`` if the tool cannot make such a load."""

    def figures(self, folder: Path) -> dict[str, float]:
        """Read the command's output. Raises ``OSError``, ``ValueError``, ``KeyError`` or
        ``TypeError`` if it is no result."""


def options(given: Mapping[str, object]) -> list[str]:
    """``--name value`` for each; ``--name`` alone for ``True``."""
    words = []
    for name, value in given.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def installed(package: str, places: Iterable[Path] = ()) -> str | None:
    """The version of a package in this environment or in ``places``; ``None`` without one."""
    paths = [str(place) for place in places]
    found = metadata.distributions(path=paths, name=package) if paths else None
    try:
        return next(iter(found)).version if found else metadata.version(package)
    except (StopIteration, metadata.PackageNotFoundError):
        return None


def packages_of(environment: str) -> list[Path]:
    """The package folder of a tool's own environment; a path that does not exist without one."""
    folder = ENVIRONMENTS / environment
    return sorted(folder.glob("lib/python*/site-packages")) or [folder]


def program(environment: str, name: str) -> str:
    return str(ENVIRONMENTS / environment / "bin" / name)
