"""Attributes that our sources read of another package's objects, as far as annotations tell.

A parameter or a field of ours that is annotated with such a class has its fields; so does what it
is assigned to, and a class of ours that derives from it. Nothing is followed through calls.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

Uses = set[tuple[str, str]]
"""(class, attribute); of what one with several bases inherits, all of them."""
AND = " and "

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def attribute_uses(
    source: str, classes: Collection[str], fields: Mapping[tuple[str, str], str]
) -> Uses:
    """Of ``classes``, by their names. ``fields``: what class some of their fields are of."""
    tree = ast.parse(source)
    own = {f"self.{name}": kind for name, kind in _annotated(tree, classes)}
    found: Uses = set()
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            found.update(_Scope(node, classes, fields, own).uses())
        elif isinstance(node, ast.ClassDef):
            line = AND.join(bases(node, classes))
            found.update((line, name) for name in _inherited(node) if line)
    return found


def bases(node: ast.ClassDef, classes: Collection[str]) -> list[str]:
    """Which of the classes one of ours derives from."""
    names = [ast.unparse(b.value if isinstance(b, ast.Subscript) else b) for b in node.bases]
    return [name for name in names if name in classes]


def _inherited(node: ast.ClassDef) -> set[str]:
    """What a class reads of itself and does not define."""
    own = {each.name for each in node.body if isinstance(each, _Function)}
    read: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign):
            own.add(ast.unparse(each.target).removeprefix("self."))
        elif isinstance(each, ast.Assign):
            own.update(ast.unparse(target).removeprefix("self.") for target in each.targets)
        elif isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
            read.add(each.attr)
    return read - own


class _Scope:
    """One function, and what it knows of the variables in it."""

    def __init__(
        self,
        function: _Function,
        classes: Collection[str],
        fields: Mapping[tuple[str, str], str],
        own: Mapping[str, str],
    ) -> None:
        self._function = function
        self._fields = fields
        arguments = (
            *function.args.posonlyargs,
            *function.args.args,
            *function.args.kwonlyargs,
        )
        self._kinds = dict(own)
        for each in arguments:
            if each.annotation is not None and (kind := _class_in(each.annotation, classes)):
                self._kinds[each.arg] = kind

    def uses(self) -> Iterator[tuple[str, str]]:
        for node in ast.walk(self._function):
            if isinstance(node, ast.Assign):
                self._assign(node.targets[0], node.value)
        for node in ast.walk(self._function):
            if isinstance(node, ast.Attribute) and (kind := self._kind(node.value)):
                yield kind, node.attr

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its)
        elif isinstance(target, ast.Name) and (kind := self._kind(value)):
            self._kinds[target.id] = kind

    def _kind(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name | ast.Attribute) and (
            known := self._kinds.get(ast.unparse(node))
        ):
            return known
        if isinstance(node, ast.Attribute) and (owner := self._kind(node.value)):
            return self._fields.get((owner, node.attr))
        return None


def _annotated(tree: ast.AST, classes: Collection[str]) -> Iterator[tuple[str, str]]:
    """Fields that classes of ours declare, or set to a parameter that is annotated."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            name = ast.unparse(node.target).removeprefix("self.")
            if kind := _class_in(node.annotation, classes):
                yield name, kind
        if isinstance(node, _Function) and node.name == "__init__":
            yield from _kept(node, classes)


def _kept(function: _Function, classes: Collection[str]) -> Iterator[tuple[str, str]]:
    kinds = {
        each.arg: kind
        for each in function.args.args
        if each.annotation is not None and (kind := _class_in(each.annotation, classes))
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            target = ast.unparse(node.targets[0])
            if target.startswith("self.") and node.value.id in kinds:
                yield target.removeprefix("self."), kinds[node.value.id]


def _class_in(annotation: ast.expr, classes: Collection[str]) -> str | None:
    """The class, itself or beside ``None``; not one inside a container."""
    if isinstance(annotation, ast.BinOp):
        return _class_in(annotation.left, classes) or _class_in(annotation.right, classes)
    name = ast.unparse(annotation)
    return name if name in classes else None
