"""What the matrix knows of a tool: a command line for a server, and how to read what it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

from tests.support import ROOT

ENVIRONMENTS = ROOT / ".cache" / "field"
"""Where ``make field`` puts the environments of tools that are no dependency."""


@dataclass(frozen=True)
class Load:
    """How much is asked. ``num_contexts`` of ``context_tokens`` are a few times what the paged
    cache of ``paged_tokens`` holds. Traces are made ``trace_scale`` times shorter."""

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
    """A server, as a tool needs to know it. ``folder`` is for what the tool writes."""

    address: str
    model_name: str
    tokenizer: Path
    load: Load
    folder: Path

    @property
    def url(self) -> str:
        return f"http://{self.address}"


class Tool(Protocol):
    """``figures`` are the tool's own, under the names of :data:`benchmarks.field.table.MEASURES`
    where they mean the same, and under the tool's own names otherwise."""

    name: str

    def version(self) -> str | None:
        """``None``: it is not installed."""

    def command(self, target: Target) -> list[str]:
        """Raises ``ValueError`` if the tool has nothing to ask under such a load."""

    def figures(self, folder: Path) -> dict[str, float]:
        """Read what the command wrote. Raises ``OSError``, ``ValueError``, ``KeyError`` or
        ``TypeError`` if that is no result."""


def options(given: Mapping[str, object]) -> list[str]:
    """``--name value`` for each. ``True`` stands for an option without a value."""
    words = []
    for name, value in given.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def installed(package: str, places: Iterable[Path] = ()) -> str | None:
    """The version of a package here, or in ``places`` to import from; ``None`` without one."""
    paths = [str(place) for place in places]
    found = metadata.distributions(path=paths, name=package) if paths else None
    try:
        return next(iter(found)).version if found else metadata.version(package)
    except (StopIteration, metadata.PackageNotFoundError):
        return None


def packages_of(environment: str) -> list[Path]:
    """Where a tool's own environment keeps its packages; a place that is not there without one."""
    folder = ENVIRONMENTS / environment
    return sorted(folder.glob("lib/python*/site-packages")) or [folder]


def program(environment: str, name: str) -> str:
    return str(ENVIRONMENTS / environment / "bin" / name)
