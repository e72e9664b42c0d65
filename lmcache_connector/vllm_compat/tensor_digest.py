"""A digest of the tensors a model computes with, by name, form and content.

128 bits or more of each tensor, exact for a change of one element, and dependent on where every
element lies. BLAKE3 reads the bytes of tensors in host memory, without the interpreter lock. A
kernel reads those on a GPU where they are (:mod:`~lmcache_connector.vllm_compat.tensor_sums`): the
two digests of one content differ, and so does the KV of the two devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from blake3 import blake3

from lmcache_connector.keys.prefix_hash import canonical_bytes

# What vLLM makes of a parameter of MLA and computes with beside it. Whoever loads other weights in
# place may leave these as they were.
_DERIVED = ("W_UK_T", "W_UV")


def model_digest(
    models: Mapping[str, torch.nn.Module],
    packed: Iterable[bytes],
    is_over: Callable[[], bool] = lambda: False,
) -> str | None:
    """Hexadecimal, 256 bits; ``None`` once ``is_over()`` says that nobody wants it.

    Reads every parameter and buffer of ``models``, and the tensors that their compiled linear
    layers keep for themselves. ``packed``: digests of weights that no tensor holds any more.
    """
    found = blake3()
    known: dict[object, bytes] = {}  # several names may share one tensor
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
    """Hexadecimal: how ``models`` keep their weights, whatever these are. One checkpoint comes to
    memory under other names with LoRA, without its vision encoder, or in stages of a pipeline."""
    forms = [[*_form(name, tensor), tensor.device.type] for name, tensor in _tensors(models)]
    return str(blake3(canonical_bytes(forms)).hexdigest())


def model_stamp(models: Mapping[str, torch.nn.Module]) -> list[object]:
    """Where the tensors lie and how often each was written, without reading them. What is written
    through ``tensor.data`` does not show, nor what is written to tensors made in a forward pass."""
    return [
        (name, tensor.data_ptr(), None if tensor.is_inference() else tensor._version)
        for name, tensor in _tensors(models)
    ]


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Of the elements in the order of memory: 32 bytes, or 16 of a tensor on a GPU."""
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
    """Whether some weights are in no tensor: vLLM's build for CPUs hands those of most linear
    layers to oneDNN, and leaves an empty parameter behind."""
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
    """Sines and cosines that follow from the configuration: vLLM makes them anew in another type
    when it first uses them. Those that follow from parameters (FoPE) may lag behind these."""
    is_computed = "cos_sin" in buffer and buffer in module._non_persistent_buffers_set
    return is_computed and not any(True for _ in module.parameters(recurse=False))


def _form(name: str, tensor: torch.Tensor) -> list[Any]:
    return [name, str(tensor.dtype), list(tensor.shape), list(tensor.stride())]


def closure(function: Any) -> list[Any]:
    """What a function has in its closure; nothing of what is none."""
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous: a view with its axes in the order of their strides, a copy where that leaves
    gaps."""
    if tensor.is_contiguous():
        return tensor
    axes = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    return tensor.permute(axes).contiguous()
