"""What makes the KV of a module in memory its own, by subtraction.

The identity of a model is everything that is known of it: the classes it is made of and their code,
its whole configuration, every byte of its weights as they are in memory, and the form of its KV.
Files are not asked: a model in memory may be loaded in another dtype, merged with an adapter or
trained further. The names of engines stand in the identity too, so what they store never mixes.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.config.weights_label import read_weights_label
from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.prefix_hash import PrefixHasher, canonical_bytes
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.stepwise.form import KVForm
from lmcache_connector.vllm_compat.canonical import canonical
from lmcache_connector.vllm_compat.excused import EXCUSED

# Their releases are part of the engine's name, or compute the same up to the order of sums.
_KNOWN_CODE = ("torch", "transformers")
_ADAPTERS = "peft"


@dataclass(frozen=True, slots=True)
class ModelState:
    """Whether weights may have changed, without reading them: what each tensor is and how often it
    was written to. Writes through ``.data`` and those of other processes do not show."""

    tensors: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModelState:
        return cls(
            tuple(
                (name, each.data_ptr(), 0 if each.is_inference() else each._version)
                for name, each in _all_tensors(module)
            )
        )


class ModelIdentity:
    """Names the KV of ``model``, and notices when its weights change.

    ``engine`` is the program that steps it, with its release. Raises :class:`UnsupportedError` for
    a model that cannot be told apart from others.
    """

    def __init__(
        self,
        model: object,
        engine: str,
        form: KVForm,
        config: ConnectorConfig,
        place: object = None,
    ) -> None:
        self._model = model
        self._config = config
        self._module = model if isinstance(model, torch.nn.Module) else None
        self.root: dict[str, object] = {
            "namespace": config.namespace,
            "engine": engine,
            "form": asdict(form),
            "place": place,
        }
        self._state: ModelState | None = None
        self._hasher: PrefixHasher | None = None
        self.version = 0
        """Counts how often the weights were read."""

    def refresh(self) -> bool:
        """Look whether the weights have changed since the last call; if so, and at the first call,
        read them all. Whether they have."""
        state = ModelState.of(self._module) if self._module is not None else None
        is_first, is_changed = self._hasher is None, state != self._state
        if is_first or is_changed:
            self._hasher, self._state = self._make_hasher(), state
            self.version += 1
        return is_changed and not is_first

    def keys(self, cache_salt: str | None = None) -> RequestKeys:
        """Chunk keys of a sequence, of the weights as they were at the last :meth:`refresh`."""
        assert self._hasher is not None
        label = read_weights_label(self._config.weights_label)
        return RequestKeys(self._hasher, RequestIdentity(cache_salt, weight_epoch=label))

    def _make_hasher(self) -> PrefixHasher:
        named = self._config.model_digest != "full"
        root = self.root | {
            "config": _configuration(getattr(self._model, "config", None)),
            "classes": _classes(self._module, named),
            "weights": self._weights(named),
        }
        return PrefixHasher(root, self._config.chunk_size, self._config.hash_key_bytes)

    def _weights(self, named: bool) -> str:
        if named and self._hasher is None:
            return f"named:{self._config.model_digest}"
        if named:  # the name is about the weights at the start
            return f"changed:{uuid.uuid4().hex}"
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
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            raise _unreadable(name)
        shape = list(tensor.shape)
        place = (tensor.data_ptr(), str(tensor.dtype), *shape, *tensor.stride())
        if place not in seen:
            seen[place] = _digest(name, tensor)
        found.append([name, str(tensor.dtype), shape, seen[place]])
    return str(blake3(canonical_bytes(sorted(found))).hexdigest())


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


def _all_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _configuration(config: object) -> Any:
    excused = EXCUSED["PreTrainedConfig"]
    try:
        return canonical(config, "config", lambda owner, field: field in excused)
    except UnsupportedError as error:
        raise UnsupportedError(f"The model's configuration is not plain data: {error}") from error


def _classes(module: torch.nn.Module | None, named: bool) -> dict[str, str]:
    """The classes that the model is made of, and a digest of the code of those that are neither
    torch's nor transformers'."""
    if module is None:
        return {}
    files: dict[str, str] = {}
    found = {}
    for kind in {type(each) for each in module.modules()}:
        package = kind.__module__.partition(".")[0]
        if package == _ADAPTERS:
            raise UnsupportedError(
                "Adapters of peft can be switched without a trace: merge them (merge_and_unload)."
            )
        code = "" if package in _KNOWN_CODE or named else _code_digest(kind, files)
        name = kind.__qualname__ if code else f"{kind.__module__}.{kind.__qualname__}"
        found[name] = code
    return found


def _code_digest(kind: type, files: dict[str, str]) -> str:
    try:
        file = inspect.getsourcefile(kind)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise UnsupportedError(
            f"The code of {kind.__qualname__} lies in no file: set model_digest to a name of your "
            "own."
        )
    if file not in files:
        files[file] = str(blake3(Path(file).read_bytes()).hexdigest())
    return files[file]
