"""The code that a module runs beside torch's and transformers', by the content of its files.

A class of transformers need not run its own code: research code exchanges ``forward`` of a class or
of one module, or a function that it calls. All of that lies in files of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import CellType, FunctionType, MethodType

import torch
from blake3 import blake3

from lmcache_connector.errors import UnsupportedError

# Their releases are part of the engine's name, or compute the same up to the order of sums.
_KNOWN = ("torch", "transformers")
_PLAIN = (bool, int, float, str, type(None))
_EMPTY = CellType()


def is_known(kind: type) -> bool:
    """Whether it is torch's or transformers' own, or no code of anybody's."""
    return kind.__module__.partition(".")[0] in (*_KNOWN, "builtins")


def code_of_class(kind: type) -> list[str]:
    """What of its code is neither torch's nor transformers': names and digests of files, sorted.
    Raises :class:`UnsupportedError` for code that lies in no file."""
    bases = [each for each in inspect.getmro(kind) if each not in (torch.nn.Module, object)]
    found = code_of_functions(member for each in bases for member in vars(each).values())
    others = [each for each in bases if not is_known(each) and _is_ours(_file_of(each))]
    return sorted({*found, *(f"{each.__qualname__} {_digest(_file_of(each))}" for each in others)})


def code_of_functions(functions: Iterable[object]) -> list[str]:
    """As :func:`code_of_class`, of functions; of those, too, that a ``forward`` calls by a global
    name, and of all that is called by code outside of torch and transformers."""
    found: set[str] = set()
    seen = set()
    waiting = list(_plain_functions(functions))
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        file = function.__code__.co_filename
        is_ours = _is_ours(file)
        if is_ours:
            found.add(f"{_name(function)} {_digest(file)}")
        if is_ours or function.__name__ == "forward":
            called = (function.__globals__.get(name) for name in function.__code__.co_names)
            waiting += _plain_functions([*called, *_closure(function)])
    return sorted(found)


def _plain_functions(members: Iterable[object]) -> Iterator[FunctionType]:
    """The plain functions among them, and those that they wrap."""
    waiting = list(members)
    while waiting:
        found = waiting.pop()
        if isinstance(found, property):
            waiting.append(found.fget)
        elif isinstance(found, staticmethod | classmethod | MethodType):
            waiting.append(found.__func__)
        elif isinstance(found, partial):
            waiting.append(found.func)
        elif isinstance(found, FunctionType):
            yield found
            waiting.append(getattr(found, "__wrapped__", None))


def _is_ours(file: str) -> bool:
    """Whether code lies elsewhere than torch, transformers and Python. Python makes some functions
    from no file, as the ``__init__`` of a dataclass."""
    folders, library = _known_folders()
    is_python = file.startswith(library) and not {"site-packages", "dist-packages"} & {
        *Path(file).parts
    }
    return not (is_python or file == "<string>" or file.startswith(("<frozen ", *folders)))


@cache
def _known_folders() -> tuple[tuple[str, ...], str]:
    specs = [find_spec(name) for name in _KNOWN]
    folders = tuple(f"{Path(spec.origin).parent}/" for spec in specs if spec and spec.origin)
    return folders, f"{Path(inspect.__file__).parent}/"


def _name(function: FunctionType) -> str:
    """With the plain values that it was made with."""
    values = [*_closure(function), *(function.__defaults__ or ())]
    return f"{function.__qualname__} {[each for each in values if isinstance(each, _PLAIN)]}"


def _closure(function: FunctionType) -> list[object]:
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if cell != _EMPTY]


def _file_of(kind: type) -> str:
    try:
        return inspect.getsourcefile(kind) or f"<{kind.__qualname__}>"
    except TypeError:
        return f"<{kind.__qualname__}>"


def _digest(file: str) -> str:
    if not Path(file).is_file():
        raise UnsupportedError(
            f"Some of the model's code lies in no file ({file}): set model_digest to a name of "
            "your own."
        )
    return str(blake3(Path(file).read_bytes()).hexdigest())
