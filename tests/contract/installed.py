"""What the packages have that are installed here, looked up in the running process.

Fields that only an initialiser sets are found in its code: nothing is instantiated. Where another
stands before it, in that which it wraps.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.contract.contract import Found

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ABSENT = object()


def installed(module: str, name: str) -> Found | None:
    """Imports the module. ``None`` if it or the name is not there."""
    found = _module(module)
    for part in name.split("."):
        # A module is there before its package names it.
        inner = getattr(found, part, _ABSENT)
        found = inner if inner is not _ABSENT else _module(f"{module}.{name}")
        if found is _ABSENT:
            return None
    if isinstance(found, type):
        abstract: frozenset[str] = getattr(found, "__abstractmethods__", frozenset())
        return Found(members=_members(found), abstract=abstract)
    if inspect.isroutine(found):
        parameters, takes_any = _parameters(found, is_method="." in name)
        return Found(parameters, takes_any)
    return Found()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return _ABSENT


def _parameters(function: Any, is_method: bool) -> tuple[tuple[tuple[str, bool], ...] | None, bool]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # of an extension module
        return None, True
    if is_method and parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    named = [each for each in parameters if each.kind not in _VARIADIC]
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return tuple((each.name, each.default is inspect.Parameter.empty) for each in named), takes_any


@cache
def _members(kind: type) -> frozenset[str]:
    return frozenset((*dir(kind), *(name for base in kind.__mro__ for name in _fields(base))))


def _fields(kind: type) -> Iterator[str]:
    """Of a class's own: declared, or set by its initialiser."""
    yield from vars(kind).get("__annotations__", ())
    code = getattr(inspect.unwrap(vars(kind).get("__init__")), "__code__", None)  # type: ignore[arg-type]
    if code is not None:
        yield from (i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")
