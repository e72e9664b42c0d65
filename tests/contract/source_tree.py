"""What a source tree has under a name, read with ``ast``: nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.contract.contract import Found

_MAX_HOPS = 8
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class SourceTree:
    """An unpacked wheel, or a folder of packages."""

    root: Path
    _modules: dict[str, _Module | None] = field(default_factory=dict)

    def surface(self, module: str, name: str) -> Found | None:
        """See :data:`~tests.contract.contract.Surface`."""
        first, _, method = name.partition(".")
        found = self._definition(module, first)
        if found is None:
            is_module = self._module(f"{module}.{name}") is not None
            return Found() if is_module else None
        node, at = found
        if isinstance(node, ast.ClassDef):
            line = list(self._ancestors(node, at))
            if method:
                defined = next((m for each in line if (m := _methods(each).get(method))), None)
                return _of_function(defined, is_method=True) if defined is not None else None
            return Found(members=_members(line), abstract=_abstract(line))
        return _of_function(node, is_method=False) if isinstance(node, _Function) else Found()

    def _definition(self, module: str, name: str) -> tuple[ast.AST, str] | None:
        """Where a name is defined, and in which module: imports are followed."""
        for _ in range(_MAX_HOPS):
            read = self._module(module)
            node = read.names.get(name) if read is not None else None
            if not isinstance(node, ast.ImportFrom):
                return None if node is None else (node, module)
            name = next(a.name for a in node.names if (a.asname or a.name) == name)
            assert read is not None
            module = read.resolve(node)
            if self._module(f"{module}.{name}") is not None:
                return ast.Pass(), module  # a module itself
            if self._module(module) is None:
                return ast.Pass(), module  # of another package
        return None

    def _ancestors(self, node: ast.ClassDef, module: str) -> Iterator[ast.ClassDef]:
        """The class, then its bases, as far as they are in this tree."""
        yield node
        for base in node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(expression, ast.Name):
                found = self._definition(module, expression.id)
                if found is not None and isinstance(found[0], ast.ClassDef):
                    yield from self._ancestors(found[0], found[1])

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            path = self.root.joinpath(*name.split("."))
            files = (path.with_suffix(".py"), path / "__init__.py")
            file = next((each for each in files if each.is_file()), None)
            self._modules[name] = _Module(name, file) if file is not None else None
        return self._modules[name]


@dataclass
class _Module:
    name: str
    file: Path

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """What is defined or imported at its top, under whatever condition. Of several definitions
        the last counts; a definition counts more than an import."""
        found: dict[str, ast.AST] = {}
        for node in _statements(ast.parse(self.file.read_text()).body):
            for name in _bound(node):
                if not (isinstance(node, ast.ImportFrom) and name in found):
                    found[name] = node
        return found

    def resolve(self, node: ast.ImportFrom) -> str:
        """The absolute name of the module that is imported from."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        package = parts if self.file.name == "__init__.py" else parts[:-1]
        kept = package[: len(package) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node.body)
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.orelse)
        if isinstance(node, ast.Try):
            yield from _statements(s for handler in node.handlers for s in handler.body)


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _methods(node: ast.ClassDef) -> dict[str, _Function]:
    return {each.name: each for each in _statements(node.body) if isinstance(each, _Function)}


def _members(line: Iterable[ast.ClassDef]) -> frozenset[str]:
    found: set[str] = set()
    for node in line:
        for statement in _statements(node.body):
            found.update(_bound(statement))
        for method in _methods(node).values():
            found.update(_set_on_self(method))
    return frozenset(found)


def _set_on_self(method: _Function) -> Iterator[str]:
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def _abstract(line: Iterable[ast.ClassDef]) -> frozenset[str]:
    """Methods whose nearest definition is abstract."""
    nearest: dict[str, _Function] = {}
    for node in line:
        for name, method in _methods(node).items():
            nearest.setdefault(name, method)
    return frozenset(
        name
        for name, method in nearest.items()
        if any("abstractmethod" in ast.unparse(d) for d in method.decorator_list)
    )


def _of_function(node: _Function, *, is_method: bool) -> Found:
    every = [*node.args.posonlyargs, *node.args.args]
    needed = len(every) - len(node.args.defaults)
    parameters = [(arg.arg, i < needed) for i, arg in enumerate(every)]
    is_static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
    if is_method and not is_static:
        parameters = parameters[1:]  # self, or the class
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    parameters += [(arg.arg, default is None) for arg, default in pairs]
    return Found(tuple(parameters), takes_any=node.args.kwarg is not None)
