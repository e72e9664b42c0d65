"""Identity of a model in memory: its state, not its code.

It consists of the modules' classes by name and their plain attributes; the configuration; every
byte of the weights in memory, or ``model_digest``; the precision of float32 products; the form of
the KV; and the engine's name, so that two kinds of engines never share KV. Files do not count: a
model in memory may have been cast, merged or trained. ``label`` identifies the caller's
own code. Passes altered by hooks, autocast or training are not identified: see :func:`alteration`.

The state is read before every prompt, so this must be fast. A tensor's address and version do not
show every write: fused optimizers, adapter merges through ``.data`` and weights made in inference
mode leave no trace. So some elements of each tensor are compared too.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lmcache_connector.config.strict import read_weights_label
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.errors import ConfigError, UnsupportedError
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.stepwise.form import KVForm
from lmcache_connector.vllm_compat.canonical import canonical
from lmcache_connector.vllm_compat.identity_tables import NOT_PART_OF_IDENTITY
from lmcache_connector.vllm_compat.tensor_digest import model_digest, tensor_digest

_ADAPTERS = "peft"
_RELEASED = ("torch", "transformers", "builtins")
_NUM_SAMPLES = 32
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
# Forward hooks that only observe, belong to the tiers, compute weights or distribute tensors.
_HARMLESS = ("transformers.", "lmcache_connector.", "torch.nn.utils.", "torch.distributed.tensor.")
# Nothing is stored in training mode; the rest does not affect KV.
_NO_ATTRIBUTES = frozenset({"training", "name_or_path", "gradient_checkpointing"})


class ModelIdentity:
    """Identifies the KV of ``model``, and detects changes of its weights and settings.

    ``engine``: name and release of the program that steps the model. ``label``: the caller's name
    for the model's code. ``place``: distinguishes ranks that hold parts of one model. Raises
    :class:`UnsupportedError` for a model without an identity.
    """

    def __init__(
        self,
        model: object,
        engine: str,
        form: KVForm,
        config: ConnectorConfig,
        place: object = None,
        label: str = "",
    ) -> None:
        self._model = model
        self._config = config
        self._module = model if isinstance(model, torch.nn.Module) else None
        self.root: dict[str, object] = {
            "namespace": config.namespace,
            "engine": engine,
            "form": asdict(form),
            "place": place,
            "label": label,
        }
        self._tensors: TensorState | None = None
        self._weights = ""
        self._settings: object = None
        self._hasher: PrefixHasher | None = None
        self.version = 0
        """Number of changes of the model, the first state included."""

    def refresh(self) -> bool:
        """Whether the model has changed since the last call. Reads all weights at the first call
        and after each change of a tensor, unless ``model_digest`` names them."""
        is_first, module = self._hasher is None, self._module
        tensors = TensorState.of(module) if module is not None else None
        modules = _modules(module) if module is not None else {}
        settings = (modules, _configuration(self._model), _float32_arithmetic())
        if not is_first and tensors == self._tensors and settings == self._settings:
            return False
        weights = self._weights
        if is_first or tensors != self._tensors:
            weights = self._name_of_weights(is_first)
        root = self.root | {
            "config": settings[1],
            "classes": _class_names({kind for kind, _ in modules.values()}),
            "values": {
                name: {key: _text(value) for key, value in attributes.items()}
                for name, (_, attributes) in modules.items()
                if attributes
            },
            "arithmetic": settings[2],
            "weights": weights,
        }
        config = self._config
        self._hasher = PrefixHasher(root, config.chunk_size, config.hash_key_bytes)
        self._weights, self._tensors, self._settings = weights, tensors, settings
        self.version += 1
        return not is_first

    def keys(self, cache_salt: str | None = None) -> RequestKeys:
        """Chunk keys of a sequence, for the model as of the last :meth:`refresh`."""
        assert self._hasher is not None
        try:
            label = read_weights_label(self._config.weights_label)
        except ConfigError:  # a file being written: nobody else has these keys
            label = uuid.uuid4().hex
        return RequestKeys(self._hasher, RequestIdentity(cache_salt, weights=label))

    def _name_of_weights(self, is_first: bool) -> str:
        if self._config.model_digest != "full":  # the name covers the weights at start only
            name = f"named:{self._config.model_digest}"
            return name if is_first else f"changed:{uuid.uuid4().hex}"
        if self._module is None:
            raise UnsupportedError(
                "The model is no torch.nn.Module, so its weights are not known: set model_digest "
                "to a name of your own."
            )
        return f"memory:{weights_in_memory(self._module)}"


@dataclass(frozen=True, slots=True)
class TensorState:
    """Name, address, version, dtype and shape of all parameters and buffers, and samples of their
    bytes."""

    places: tuple[tuple[object, ...], ...]
    samples: tuple[bytes, ...]

    @classmethod
    def of(cls, module: torch.nn.Module) -> TensorState:
        places: list[tuple[object, ...]] = []
        chosen: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for name, each in _leaves(_all_tensors(module)):
            place = each.data_ptr() if _is_readable(each) else id(each)
            version = 0 if each.is_inference() else each._version
            places.append((name, place, version, each.dtype, each.shape))
            if (sample := _sample(each)) is not None:
                chosen.setdefault((each.device, sample.dtype), []).append(sample)
        found = (torch.cat(each).cpu().numpy().tobytes() for each in chosen.values())
        return cls(tuple(places), tuple(found))


def weights_in_memory(module: torch.nn.Module) -> str:
    """Hexadecimal digest of all parameters and buffers: names, dtypes and bytes. Raises
    :class:`UnsupportedError` if bytes are not readable here."""
    for name, each in (*_all_tensors(module), *module.state_dict(keep_vars=True).items()):
        if not isinstance(each, torch.Tensor) or not _is_readable(each):
            raise UnsupportedError(
                f"The bytes of the weight {name} cannot be read: set model_digest to a name of "
                "your own."
            )
    # model_digest omits rotary caches, which vLLM recomputes; here a cast may have rounded them.
    rotary = (tensor_digest(each) for name, each in module.named_buffers() if "cos_sin" in name)
    return str(model_digest({"model": module}, packed=rotary))


def _modules(module: torch.nn.Module) -> dict[str, tuple[type, Mapping[str, object]]]:
    """By module name: class, and attributes that are plain values or functions, such as a
    ``forward`` set on the instance."""
    return {
        name: (
            type(each),
            {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in vars(each).items()
                if key[0] != "_" and key not in _NO_ATTRIBUTES and _is_setting(value)
            },
        )
        for name, each in module.named_modules()
    }


def _is_setting(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, (*_PLAIN, *_FUNCTIONS))


def _text(value: object) -> str:
    if isinstance(value, _FUNCTIONS):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)


def _class_names(kinds: Iterable[type]) -> list[str]:
    """Sorted. Raises :class:`UnsupportedError` for unmerged adapters."""
    packages = {kind: kind.__module__.partition(".")[0] for kind in kinds}
    if _ADAPTERS in packages.values():
        raise UnsupportedError(
            "peft adapters can be switched unnoticed: merge them (merge_and_unload)."
        )
    # The module name of a model's own code depends on its path.
    return sorted(
        f"{kind.__module__}.{kind.__qualname__}" if package in _RELEASED else kind.__qualname__
        for kind, package in packages.items()
    )


def _configuration(model: object) -> Any:
    ignored = NOT_PART_OF_IDENTITY["PreTrainedConfig"]
    config = getattr(model, "config", None)
    try:
        return canonical(config, "config", lambda owner, field: field in ignored)
    except UnsupportedError as error:
        raise UnsupportedError(f"The model's configuration is not plain data: {error}") from error


def alteration(model: object, device_type: str) -> str:
    """Why a pass through ``model`` computes other KV than its identity determines; empty if it does
    not. Called before and after every pass, so it must be fast."""
    if torch.is_autocast_enabled(device_type):
        return "the model runs under autocast"
    tables = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    modules: list[Any] = [model] if isinstance(model, torch.nn.Module) else []
    seen: set[torch.nn.Module] = set()
    for each in modules:  # Module.modules() is slower
        if each is None or each in seen:
            continue
        if each._modules:
            seen.add(each)
            modules += each._modules.values()
        if each.training:
            return "the model, or a part of it, is in training mode (model.eval() ends that)"
        if each._forward_hooks or each._forward_pre_hooks:
            tables += [each._forward_hooks, each._forward_pre_hooks]
    hooks = [hook for table in tables for hook in [*table.values()]]  # other threads change tables
    if any(not str(getattr(hook, "__module__", "")).startswith(_HARMLESS) for hook in hooks):
        return "the model has forward hooks of other code"
    return ""


def is_split(model: object) -> bool:
    """Whether torch has split the model's weights over ranks, as DTensors."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return any(hasattr(each, "device_mesh") for each in parameters)


def _float32_arithmetic() -> list[str]:
    """Precision of float32 products in torch."""
    matmul = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    found = [each.fp32_precision for each in matmul]
    return ["ieee" if each == "none" else each for each in found]


def _all_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, including non-persistent ones."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own, rather than wrapping other tensors."""
    is_plain = tensor.layout == torch.strided and not tensor.is_meta
    return is_plain and not is_traceable_wrapper_subclass(tensor)


def _leaves(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Replaces wrapper tensors, such as some quantized weights, by their parts."""
    for name, each in tensors:
        if is_traceable_wrapper_subclass(each):
            parts = each.__tensor_flatten__()[0]
            yield from _leaves((f"{name}.{part}", getattr(each, part)) for part in parts)
        elif isinstance(each, torch.Tensor):  # a DTensor names its DeviceMesh too
            yield name, each


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Up to :data:`_NUM_SAMPLES` elements of the tensor's memory, as integers."""
    as_integer = _INTEGERS.get(tensor.element_size())
    if as_integer is None or tensor.numel() == 0 or not _is_readable(tensor):
        return None
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes)
    number = min(_NUM_SAMPLES, span)
    step = span // number
    step -= step > 1 and step % 2 == 0  # an even step would always skip columns
    some = tensor.detach().as_strided((number,), (step,), tensor.storage_offset())
    return some.view(as_integer)
