"""Any configuration as plain JSON values, equal for equal content in every process.

Objects become their type's name and fields, sets are sorted, types and functions become their
names. A value without a reproducible form, such as an open file, is an error: a memory address in a
key would silently separate every instance.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.prefix_hash import canonical_bytes

_MAX_DEPTH = 32
# Types with state outside of their fields.
_HIDDEN_STATE = (torch.Tensor, torch.nn.Module, io.IOBase, ModuleType, MethodType)
_NO_FIELDS = ("__dict__", "__weakref__", "__pydantic_fields_set__")

IsIgnored = Callable[[object, str], bool]
"""Whether the named field of an object is left out."""


def canonical(value: object, path: str, is_ignored: IsIgnored) -> Any:
    """``value`` as JSON values without ignored fields. ``path``: its name in messages. Raises
    :class:`UnsupportedError` for values without a canonical form.
    """
    return _form(value, path, is_ignored, ())


def _form(value: object, path: str, is_ignored: IsIgnored, outer: tuple[int, ...]) -> Any:
    """``outer``: ids of the enclosing objects. A reference to one of these becomes its distance."""
    if value is None or type(value) in (bool, int, str):
        return value
    scalar = _scalar(value, path)
    if scalar is not None:
        return scalar
    if id(value) in outer:
        return {"outer": len(outer) - outer.index(id(value))}
    if len(outer) > _MAX_DEPTH:
        raise _nameless(value, path)

    def form(part: object, part_path: str = path) -> Any:
        return _form(part, part_path, is_ignored, (*outer, id(value)))

    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: form(each, f"{path}.{key}") for key, each in value.items()}
        pairs = ([form(key), form(each, f"{path}[{key!r}]")] for key, each in value.items())
        return {"pairs": _sorted(pairs)}
    if isinstance(value, list | tuple):
        return [form(each, f"{path}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, set | frozenset):
        return {"set": _sorted(map(form, value))}
    if isinstance(value, functools.partial):
        return {"partial": [form(part) for part in (value.func, value.args, value.keywords)]}
    fields = {
        name: form(each, f"{path}.{name}")
        for name, each in _fields_of(value, path).items()
        if not is_ignored(value, name)
    }
    return {"is": _type_name(value), **fields}


def _scalar(value: object, path: str) -> Any:
    """The form of a value without parts; ``None`` for other values."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, torch.dtype | torch.device | PurePath):
        return str(value)
    if isinstance(value, re.Pattern):
        return {"pattern": str(value.pattern), "flags": value.flags}
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        if "<" in value.__qualname__ or not value.__module__:
            raise _nameless(value, path)
        return f"{value.__module__}.{value.__qualname__}"
    return None


def _fields_of(value: object, path: str) -> dict[str, object]:
    """Fields by name, without cached properties."""
    kind = type(value)
    slots = [name for each in kind.__mro__ for name in _slots(each)]
    if isinstance(value, _HIDDEN_STATE) or not (
        slots or isinstance(getattr(value, "__dict__", None), dict)
    ):
        raise _nameless(value, path)
    fields = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    fields |= getattr(value, "__dict__", {})
    return {
        name: each
        for name, each in fields.items()
        if not isinstance(getattr(kind, name, None), functools.cached_property)
    }


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in _NO_FIELDS]


def _type_name(value: object) -> str:
    kind = type(value)
    if isinstance(value, PreTrainedConfig):
        return f"hf:{value.model_type}"
    # The module name of a model's own code depends on its path.
    is_remote = kind.__module__.startswith("transformers_modules")
    return kind.__qualname__ if is_remote else f"{kind.__module__}.{kind.__qualname__}"


def _sorted(forms: Iterable[Any]) -> list[Any]:
    return sorted(forms, key=canonical_bytes)


def _nameless(value: object, path: str) -> UnsupportedError:
    kind = type(value)
    return UnsupportedError(
        f"lmcache-connector cannot tell models apart by {path}, which holds a "
        f"{kind.__module__}.{kind.__qualname__}: put plain data there, or run the model "
        "without lmcache-connector."
    )
