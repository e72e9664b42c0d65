"""What a module in memory looks like now, read so quickly that every forward pass can ask.

Neither a tensor's place nor its version shows every write: fused optimizers, merges of adapters by
``.data`` and weights made in inference mode leave no trace in them. So some elements of each tensor
are read as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_NUM_SAMPLES = 32
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
# Whether it trains is asked before every pass; its name and counts of warnings change no KV.
_NO_ATTRIBUTES = frozenset({"training", "name_or_path", "gradient_checkpointing"})


@dataclass(frozen=True, slots=True)
class TensorState:
    """Of all parameters and buffers: what and where each is, how often it was written to, and
    every so many of its bytes."""

    places: tuple[tuple[object, ...], ...]
    samples: tuple[bytes, ...]

    @classmethod
    def of(cls, module: torch.nn.Module) -> TensorState:
        places: list[tuple[object, ...]] = []
        chosen: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for name, each in _leaves(all_tensors(module)):
            place = each.data_ptr() if is_readable(each) else id(each)
            version = 0 if each.is_inference() else each._version
            places.append((name, place, version, each.dtype, each.shape))
            if (sample := _sample(each)) is not None:
                chosen.setdefault((each.device, sample.dtype), []).append(sample)
        found = (torch.cat(each).cpu().numpy().tobytes() for each in chosen.values())
        return cls(tuple(places), tuple(found))


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """Of every module, by name: its class, and its attributes that are plain values or functions.
    ``members``: functions of the classes, which may be exchanged in them."""

    kinds: Mapping[str, type]
    attributes: Mapping[str, Mapping[str, object]]
    members: tuple[object, ...]

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModuleShape:
        kinds: dict[str, type] = {}
        attributes: dict[str, dict[str, object]] = {}
        for name, each in module.named_modules():
            kinds[name] = type(each)
            attributes[name] = {
                key: _frozen(value)
                for key, value in vars(each).items()
                if key[0] != "_" and key not in _NO_ATTRIBUTES and _counts(value)
            }
        distinct = sorted(set(kinds.values()), key=lambda kind: (kind.__module__, kind.__name__))
        members = (member for kind in distinct for member in vars(kind).values())
        functions = tuple(member for member in members if isinstance(member, _FUNCTIONS))
        return cls(kinds, attributes, functions)

    def functions(self) -> Iterator[object]:
        """Those that stand in the place of a class's own."""
        for attributes in self.attributes.values():
            yield from (each for each in attributes.values() if isinstance(each, _FUNCTIONS))

    def values(self) -> dict[str, dict[str, str]]:
        """Plain values and the names of functions, by module and attribute."""
        return {
            name: {key: _text(value) for key, value in values.items()}
            for name, values in self.attributes.items()
            if values
        }


def all_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, those included that no file holds."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _counts(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, (*_PLAIN, *_FUNCTIONS))


def _text(value: object) -> str:
    if isinstance(value, _FUNCTIONS):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, tuple | list) else value


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether it is bytes at a place of its own, and no wrapper of others."""
    is_plain = tensor.layout == torch.strided and not tensor.is_meta
    return is_plain and not is_traceable_wrapper_subclass(tensor)


def _leaves(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """With the parts of those that are made of others, as some quantized weights are."""
    for name, each in tensors:
        if is_traceable_wrapper_subclass(each):
            parts = each.__tensor_flatten__()[0]
            yield from _leaves((f"{name}.{part}", getattr(each, part)) for part in parts)
        else:
            yield name, each


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Up to :data:`_NUM_SAMPLES` elements of the tensor's memory, as integers."""
    as_integer = _INTEGERS.get(tensor.element_size())
    if as_integer is None or tensor.numel() == 0 or not is_readable(tensor):
        return None
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes)
    number = min(_NUM_SAMPLES, span)
    step = span // number
    step -= step > 1 and step % 2 == 0  # an odd step meets every column of a matrix
    some = tensor.detach().as_strided((number,), (step,), tensor.storage_offset())
    return some.view(as_integer)
