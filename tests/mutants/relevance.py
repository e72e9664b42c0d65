"""The test files most relevant to a module: those that import it by the shortest way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE, TESTS = "lmcache_connector", "tests"


class Imports:
    """The imports of a tree, product and tests."""

    def __init__(self, root: Path) -> None:
        files = {_name(root, file): file for file in _files(root)}
        self._importers: dict[str, set[str]] = {name: set() for name in files}
        self._tests = {
            name: file.relative_to(root).as_posix()
            for name, file in files.items()
            if file.name.startswith("test_")
        }
        for name, file in files.items():
            for imported in _imported(ast.parse(file.read_bytes())):
                if imported in files:
                    self._importers[imported].add(name)

    def tests_of(self, module: str, *, directly: bool = False) -> list[str]:
        """Test files that import the file, or its importers; the nearest first."""
        names = sorted(self._importers.get(module, ())) if directly else self._reach(module)
        return [self._tests[name] for name in names if name in self._tests]

    def is_simulated(self, module: str) -> bool:
        return any(name.startswith("tests.simulation.") for name in self._reach(module))

    def _reach(self, module: str) -> list[str]:
        """Breadth first."""
        reached = dict.fromkeys([module])
        for name in (queue := [module]):
            new = sorted(self._importers.get(name, set()) - reached.keys())
            reached |= dict.fromkeys(new)
            queue += new
        return list(reached)


def mirror(file: str) -> Path:
    """The test file at a product file's place."""
    path = Path(file.removeprefix(f"{PACKAGE}/"))
    return Path(TESTS) / path.parent / f"test_{path.name}"


def _files(root: Path) -> Iterator[Path]:
    for top in (PACKAGE, TESTS):
        yield from (root / top).rglob("*.py")
    yield from (root / PACKAGE / "storage").resolve().rglob("*.py")  # behind a link


def _name(root: Path, file: Path) -> str:
    path = file.relative_to(root).with_suffix("")
    parts = path.parts if path.parts[0] in (PACKAGE, TESTS) else (PACKAGE, *path.parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Names of imported modules, and of names that may be modules; none of type-only imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from _imported(node)
