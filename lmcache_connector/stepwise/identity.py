"""What makes the KV of a module in memory its own, by subtraction.

The identity of a model is everything that is known of it: the classes it is made of and their code,
its whole configuration, every byte of its weights as they are in memory, and the form of its KV.
Files are not asked: a model in memory may be loaded in another dtype, merged with an adapter or
trained further. The names of engines stand in the identity too, so what they store never mixes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from blake3 import blake3

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.config.weights_label import read_weights_label
from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.prefix_hash import PrefixHasher, canonical_bytes
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.stepwise.form import KVForm
from lmcache_connector.stepwise.module_code import code_of_class, code_of_functions, is_known
from lmcache_connector.stepwise.module_state import (
    ModuleShape,
    TensorState,
    all_tensors,
    is_readable,
)
from lmcache_connector.vllm_compat.canonical import canonical
from lmcache_connector.vllm_compat.excused import NOT_PART_OF_IDENTITY

_ADAPTERS = "peft"


class ModelIdentity:
    """Names the KV of ``model``, and notices when it changes: its weights, its settings, its code.

    ``engine`` is the program that steps it, with its release; ``functions`` are those that it
    chooses by a name in its configuration. Raises :class:`UnsupportedError` for a model that cannot
    be told apart from others.
    """

    def __init__(
        self,
        model: object,
        engine: str,
        form: KVForm,
        config: ConnectorConfig,
        place: object = None,
        functions: Callable[[], Iterable[object]] = tuple,
    ) -> None:
        self._model = model
        self._config = config
        self._functions = functions
        self._module = model if isinstance(model, torch.nn.Module) else None
        self.root: dict[str, object] = {
            "namespace": config.namespace,
            "engine": engine,
            "form": asdict(form),
            "place": place,
        }
        self._is_named = config.model_digest != "full"
        self._named: object = None
        self._weights = ""
        self._seen: object = None
        self._hasher: PrefixHasher | None = None
        self.version = 0
        """Counts how often the model was another one."""

    def refresh(self) -> bool:
        """Look whether the model has changed since the last call; if its weights have, and at the
        first call, read them all. Whether it has changed."""
        is_first = self._hasher is None
        state = TensorState.of(self._module) if self._module is not None else None
        shape = ModuleShape.of(self._module) if self._module is not None else None
        form = _configuration(getattr(self._model, "config", None))
        functions = (*self._functions(), *(shape.functions() if shape else ()))
        seen = (shape, form, functions, _float32_arithmetic())
        # A name stands for the code as well, which is not read then.
        named: object = (
            (state, shape.members if shape else (), functions) if self._is_named else state
        )
        is_changed = named != self._named or seen != self._seen
        if not (is_first or is_changed):
            return False
        weights = self._weights
        if is_first or named != self._named:
            weights = self._name_of_weights(is_first)
        self._hasher = self._make_hasher(weights, shape, form, functions)
        self._weights, self._named, self._seen = weights, named, seen
        self.version += 1
        return not is_first

    def keys(self, cache_salt: str | None = None) -> RequestKeys:
        """Chunk keys of a sequence, of the weights as they were at the last :meth:`refresh`."""
        assert self._hasher is not None
        label = read_weights_label(self._config.weights_label)
        return RequestKeys(self._hasher, RequestIdentity(cache_salt, weights=label))

    def _make_hasher(
        self,
        weights: str,
        shape: ModuleShape | None,
        form: object,
        functions: Iterable[object],
    ) -> PrefixHasher:
        root = self.root | {
            "config": form,
            "classes": _classes(set(shape.kinds.values()) if shape else set(), self._is_named),
            "values": shape.values() if shape else {},
            "code": [] if self._is_named else code_of_functions(functions),
            "arithmetic": _float32_arithmetic(),
            "weights": weights,
        }
        return PrefixHasher(root, self._config.chunk_size, self._config.hash_key_bytes)

    def _name_of_weights(self, is_first: bool) -> str:
        if self._is_named:  # a name is about the weights at the start
            name = f"named:{self._config.model_digest}"
            return name if is_first else f"changed:{uuid.uuid4().hex}"
        if self._module is None:
            raise UnsupportedError(
                "The model is no torch.nn.Module, so its weights are not known: set model_digest "
                "to a name of your own."
            )
        return f"memory:{weights_in_memory(self._module)}"


def weights_in_memory(module: torch.nn.Module) -> str:
    """Hexadecimal digest of all parameters and buffers by their names, types and bytes. Raises
    :class:`UnsupportedError` for those whose bytes are not here."""
    seen: dict[tuple[object, ...], str] = {}
    found = []
    beside = {k: v for k, v in module.state_dict(keep_vars=True).items() if not _is_tensor(v)}
    for name, tensor in (*all_tensors(module), *beside.items()):
        if not _is_tensor(tensor) or not is_readable(tensor):
            raise _unreadable(name)
        shape = list(tensor.shape)
        place = (tensor.data_ptr(), str(tensor.dtype), *shape, *tensor.stride())
        if place not in seen:
            seen[place] = _digest(name, tensor)
        found.append([name, str(tensor.dtype), shape, seen[place]])
    return str(blake3(canonical_bytes(sorted(found))).hexdigest())


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _digest(name: str, tensor: torch.Tensor) -> str:
    try:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise _unreadable(name) from error
    return str(blake3(raw, max_threads=blake3.AUTO).hexdigest())


def _unreadable(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"The bytes of the weight {name} cannot be read: set model_digest to a name of your own."
    )


def _configuration(config: object) -> Any:
    excused = NOT_PART_OF_IDENTITY["PreTrainedConfig"]
    try:
        return canonical(config, "config", lambda owner, field: field in excused)
    except UnsupportedError as error:
        raise UnsupportedError(f"The model's configuration is not plain data: {error}") from error


def _classes(kinds: Iterable[type], is_named: bool) -> list[list[object]]:
    """The classes that the model is made of, and digests of the code of those that run other than
    torch's and transformers'."""
    found: list[list[object]] = []
    for kind in kinds:
        if kind.__module__.partition(".")[0] == _ADAPTERS:
            raise UnsupportedError(
                "Adapters of peft can be switched without a trace: merge them (merge_and_unload)."
            )
        code = [] if is_named else code_of_class(kind)
        # The module of a model's own code is named after the place where it lies.
        name = f"{kind.__module__}.{kind.__qualname__}" if is_known(kind) else kind.__qualname__
        found.append([name, code])
    return sorted(found, key=canonical_bytes)


def _float32_arithmetic() -> list[str]:
    """Torch may round the factors of products to fewer bits than they have."""
    matmul = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    found = [each.fp32_precision for each in matmul]
    return ["ieee" if each == "none" else each for each in found]
