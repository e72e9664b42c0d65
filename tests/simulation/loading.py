"""Loads the product, redis-py and the engine of `benchmarks.gpu_storms` with a simulated standard
library.

Each of their modules gets an ``import`` of its own, which finds the stand-ins of `stdlib` and
`network`. Everything else in the process keeps the real ones: vLLM, torch, the simulation itself.
That has to happen before the first of those modules is imported, so the simulation runs in a
process of its own.
"""

from __future__ import annotations

import builtins
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from tests.simulation import network, serving, stdlib

STANDS: dict[str, ModuleType] = {
    "threading": stdlib.threading,
    "time": stdlib.time,
    "queue": stdlib.queue,
    "os": stdlib.os,
    "random": stdlib.random,
    "uuid": stdlib.uuid,
    "socket": network.socket,
    "select": network.select,
    "selectors": serving.selectors,
    "fcntl": network.fcntl,
}
_PACKAGES = ("lmcache_connector", "redis")
_MODULES = ("benchmarks.gpu_storms.engine", "benchmarks.gpu_storms.storm")


def _import(
    name: str,
    globals: Any = None,  # noqa: A002 - the names are those of `__import__`
    locals: Any = None,  # noqa: A002
    fromlist: Any = (),
    level: int = 0,
) -> Any:
    if level == 0 and name in STANDS:
        return STANDS[name]
    return builtins.__import__(name, globals, locals, fromlist, level)


_BUILTINS = {**vars(builtins), "__import__": _import}


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = _BUILTINS
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not _is_ours(name):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _is_ours(name: str) -> bool:
    return name in _MODULES or name.split(".")[0] in _PACKAGES


def install() -> None:
    """From here on, the product is loaded with simulated threads, clocks and sockets."""
    early = [name for name in sys.modules if _is_ours(name)]
    if early:
        raise RuntimeError(f"loaded too early: {early[0]}")
    sys.meta_path.insert(0, _Finder())
