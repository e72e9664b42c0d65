"""Digests of the tensors a model computes with: name, form and content.

At least 128 bits per tensor; a change or move of one element always shows. BLAKE3 reads tensors in
host memory, without the GIL. A kernel reads tensors on a GPU in place
(:mod:`~lmcache_connector.vllm_compat.tensor_sums`); its digest of the same content differs, as does
the KV of the two devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from blake3 import blake3

from lmcache_connector.keys.prefix_hash import canonical_bytes

# Tensors that vLLM derives from an MLA parameter. Loading other weights in place may leave them
# unchanged.
_DERIVED = ("W_UK_T", "W_UV")


def model_digest(
    models: Mapping[str, torch.nn.Module],
    packed: Iterable[bytes],
    is_over: Callable[[], bool] = lambda: False,
) -> str | None:
    """Hexadecimal, 256 bits; ``None`` once ``is_over()``.

    Covers the parameters and buffers of ``models``, except rotary caches, and tensors that layers
    derive from them. ``packed``: digests of weights that are no longer in a tensor.
    """
    found = blake3()
    known: dict[object, bytes] = {}  # names may share a tensor
    for name, tensor in _tensors(models):
        if is_over():
            return None
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in known:
            known[place] = tensor_digest(tensor)
        found.update(canonical_bytes([_form(name, tensor), known[place].hex()]))
    found.update(canonical_bytes([each.hex() for each in packed]))
    return str(found.hexdigest())


def model_form(models: Mapping[str, torch.nn.Module]) -> str:
    """Hexadecimal digest of the form of ``models``' weights. LoRA, a missing vision encoder or
    pipeline stages give the same checkpoint other names in memory."""
    forms = [[*_form(name, tensor), tensor.device.type] for name, tensor in _tensors(models)]
    return str(blake3(canonical_bytes(forms)).hexdigest())


def model_stamp(models: Mapping[str, torch.nn.Module]) -> list[object]:
    """Addresses and version counters of the tensors, without reading them. Does not show writes
    through ``tensor.data`` or to tensors made in inference mode."""
    return [
        (name, tensor.data_ptr(), None if tensor.is_inference() else tensor._version)
        for name, tensor in _tensors(models)
    ]


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Of the elements in memory order: 32 bytes, or 16 to 19 on a GPU; none without elements."""
    tensor = _in_memory_order(tensor.detach())
    if tensor.numel() == 0:
        return b""
    if tensor.is_cuda:
        from lmcache_connector.vllm_compat.tensor_sums import sums_digest

        return sums_digest(tensor)
    tensor = tensor.cpu()
    num_bytes = tensor.numel() * tensor.element_size()
    content = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())
    return bytes(blake3(memoryview(content).cast("B")).digest())


def has_hidden_weights(models: Mapping[str, torch.nn.Module]) -> bool:
    """Whether some weights are in no tensor: vLLM on CPUs hands those of most linear layers to
    oneDNN and leaves an empty parameter."""
    return any(
        not parameter.numel() and parameter.device.type == "cpu"
        for model in models.values()
        for parameter in model.parameters()
    )


def _tensors(models: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for title, model in models.items():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            yield f"{title}/{name}", parameter
        for path, module in model.named_modules(remove_duplicate=False):
            for name, buffer in module.named_buffers(path, recurse=False, remove_duplicate=False):
                if not _is_rotary_cache(module, name.rpartition(".")[2]):
                    yield f"{title}/{name}", buffer
        for name, module in model.named_modules():
            for index, value in enumerate(closure(vars(module).get("cpu_linear"))):
                if isinstance(value, torch.Tensor):
                    yield f"{title}/{name}/packed {index}", value
            for derived in _DERIVED:
                if isinstance(value := vars(module).get(derived), torch.Tensor):
                    yield f"{title}/{name}/{derived}", value


def _is_rotary_cache(module: torch.nn.Module, buffer: str) -> bool:
    """Sines and cosines that follow from the configuration: vLLM recomputes them in another dtype
    at first use. Those that follow from parameters (FoPE) may lag behind."""
    is_computed = "cos_sin" in buffer and buffer in module._non_persistent_buffers_set
    return is_computed and not any(True for _ in module.parameters(recurse=False))


def _form(name: str, tensor: torch.Tensor) -> list[Any]:
    return [name, str(tensor.dtype), list(tensor.shape), list(tensor.stride())]


def closure(function: Any) -> list[Any]:
    """The contents of a function's closure; empty for other objects."""
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous: a view with axes ordered by stride, or a copy if that has gaps."""
    if tensor.is_contiguous():
        return tensor
    axes = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    return tensor.permute(axes).contiguous()
