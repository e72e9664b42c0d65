"""The code that computes a model, where it is not vLLM's own.

vLLM names a model's class by module and class name: two versions of a plugin have the same. Nothing
is imported here: some processes of an engine shall not load the code of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from lmcache_connector.keys.weights_digest import code_files, files_digest

_OWN = "vllm.model_executor.models."
# Modules of vLLM's whose classes run the layers of a library.
_LIBRARIES = ("transformers", "terratorch")
# Of classes that a model's derives from. What transformers fetches is named with the weights.
_KNOWN = frozenset({"vllm", "torch", "builtins", "typing", "abc", "transformers_modules"})


def model_code(registered: object) -> list[str] | None:
    """What tells the versions of a model's code apart: of the class that vLLM's registry has, the
    distributions' versions and a digest of their Python files. ``None``: it is vLLM's own."""
    module = getattr(registered, "module_name", "")
    if module.startswith(_OWN):
        libraries = [name for name in _LIBRARIES if module.startswith(_OWN + name)]
        return [part for name in libraries for part in (*_versions(name), *_files(name))] or None
    kinds = getattr(registered, "model_cls", type(None)).__mro__
    modules = {module} if module else {kind.__module__ for kind in kinds}
    names = {name.partition(".")[0] for name in modules} - _KNOWN
    return [part for name in sorted(names) for part in (*_versions(name), *_files(name))]


def _versions(package: str) -> Iterator[str]:
    for name in sorted(set(packages_distributions().get(package, ()))):
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:  # removed meanwhile
            continue


def _files(package: str) -> Iterator[str]:
    """Of a top-level package, or a module that lies alone."""
    if package in _LIBRARIES and not any(".dev" in each for each in _versions(package)):
        return  # of a release the number says all
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # as of a script that is run by its name
        spec = None
    files: dict[str, Path] = {}
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        files |= code_files(Path(folder))
    origin = spec.origin if spec is not None else _file_of(package)
    if not files and origin is not None and Path(origin).is_file():
        files = {package: Path(origin)}
    yield f"{package} {files_digest(files)}"


def _file_of(module: str) -> str | None:
    """Of a module that was not imported, but is there: the script that registered its own class."""
    return getattr(sys.modules.get(module), "__file__", None)
