"""What of another package's API is used, as data, and whether a version of it still has that.

A *table* lists uses. A *surface* says what a version has: the one that is installed
(:mod:`~tests.contract.installed`), or the source tree of one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """A class, function or object, and what of it is used.

    ``name`` is that in ``module``; ``Class.method`` for a method. ``passes``: parameters that we
    call it with. ``takes``: parameters that it calls ours with, in order, where we override it.
    ``members``: fields and methods. ``abstract``: methods that whoever derives from it must have,
    and we do. ``since``: the first version that has it, where the oldest supported one does not.
    """

    module: str
    name: str
    passes: tuple[str, ...] | None = None
    takes: tuple[str, ...] | None = None
    members: tuple[str, ...] = ()
    abstract: tuple[str, ...] | None = None
    since: str | None = None
    late: bool = False
    """Importing its module has effects: it is read from sources only."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Found:
    """What a version has under a name.

    ``parameters`` without ``self``, each with whether it must be passed; ``None``: not known, or no
    function. ``takes_any``: further keywords are accepted.
    """

    parameters: tuple[tuple[str, bool], ...] | None = None
    takes_any: bool = False
    members: frozenset[str] = frozenset()
    abstract: frozenset[str] = frozenset()


Surface = Callable[[str, str], Found | None]
"""What a module has under a name; ``None``: nothing."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something used that is not there, or is another."""

    use: Use
    what: str


def missing(table: Iterable[Use], surface: Surface) -> list[Missing]:
    """All of the table that does not hold of a version."""
    return [Missing(use, what) for use in table for what in _missing(use, surface)]


def _missing(use: Use, surface: Surface) -> Iterator[str]:
    found = surface(use.module, use.name)
    if found is None:
        yield str(use)
        return
    for member in use.members:
        if member not in found.members:
            yield f"{use}.{member}"
    if use.abstract is not None:
        for method in sorted(found.abstract - set(use.abstract)):
            yield f"{use} asks for a method {method} that is not known here"
    if found.parameters is None:
        return
    names = tuple(name for name, _ in found.parameters)
    if use.passes is not None:
        for name in use.passes:
            if name not in names and not found.takes_any:
                yield f"{use}({name})"
        for name, is_needed in found.parameters:
            if is_needed and name not in use.passes:
                yield f"{use} asks for a parameter {name} that is not known here"
    if use.takes is not None:
        yield from _called_otherwise(use, names, use.takes)


def _called_otherwise(use: Use, names: tuple[str, ...], takes: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if name not in takes:
            yield f"{use} is called with a parameter {name} that is not known here"
    for name in takes:
        if name not in names:
            yield f"{use} is no longer called with a parameter {name}"
    if names != takes and sorted(names) == sorted(takes):
        yield f"{use} is called with its parameters in another order"
