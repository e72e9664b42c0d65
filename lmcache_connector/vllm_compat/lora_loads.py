"""Watches which LoRA adapters vLLM loads, by wrapping its loader.

vLLM does not tell connectors. Its workers read an adapter's files when it is added, when a request
first needs it, and again after dropping it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.lora.utils import get_adapter_absolute_path
from vllm.platforms import current_platform

from lmcache_connector.plans import LoadedAdapterList
from lmcache_connector.requests.adapters import (
    AdapterDigests,
    AdapterStamp,
    adapter_name,
    adapter_stamp,
)
from lmcache_connector.threads import Background, Task

if TYPE_CHECKING:
    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

_LOAD = "_load_adapter"


def adapter_folder(lora_path: str) -> Path | None:
    """The local folder vLLM reads for this path; ``None`` if there is none yet."""
    if lora_path.startswith("~") or Path(lora_path).is_absolute() or Path(lora_path).exists():
        return Path(get_adapter_absolute_path(lora_path))
    if envs.VLLM_USE_MODELSCOPE:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(lora_path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def adapters_leak(lora_config: LoRAConfig | None) -> bool:
    """Whether a request without an adapter may be computed with another request's adapter: vLLM's
    operators for CPUs take -1, which means none, as the index of the last adapter in memory."""
    return lora_config is not None and current_platform.is_cpu()


@dataclass(slots=True)
class _Loaded:
    """``stamp``: of the files before vLLM read them, if they existed. ``replaced_in``: number of
    the list that reports the replacement; 0 while in memory."""

    stamp: AdapterStamp | None
    name: Task[str]
    replaced_in: int = 0


class LoraLoads:
    """The LoRA adapters that one rank has in memory, identified by the files they were read from.

    Watches the loader of the engine with this ``lora_config`` until closed; ``None``: an engine
    without adapters. An adapter whose files changed while vLLM read them has no name. Runs on the
    engine's step thread; another thread digests files.
    """

    def __init__(self, lora_config: LoRAConfig | None) -> None:
        self._lora_config = lora_config
        self._digests = AdapterDigests()
        self._reads = Background("lmc-loaded-adapters")
        # By number, in order of loading. The last is in memory; the scheduler side may not know
        # that earlier ones were replaced.
        self._loaded: dict[int, list[_Loaded]] = {}
        self._num_lists = 0
        self._manager: Any = None
        self._question = 0
        self._has_changed = False
        self._stop = _watch(self._load) if lora_config is not None else lambda: None

    @property
    def has_updates(self) -> bool:
        """Whether there is a change, and all names are known."""
        if not self._has_changed:  # as in nearly every step
            return False
        return all(each.name.is_done for loaded in self._loaded.values() for each in loaded)

    def ask(self, question: int) -> None:
        """Report what is loaded, as the answer to ``question``."""
        self._question = question
        self._has_changed = True

    def report_all(self) -> None:
        """Report again what was reported."""
        self._has_changed |= self._num_lists > 0

    def take(self) -> LoadedAdapterList | None:
        """The loaded adapters, if they changed since the last call."""
        if not self.has_updates:
            return None
        self._has_changed = False
        self._num_lists += 1
        # Adapters that vLLM dropped will be read again.
        kept = self._manager.list_adapters() if self._manager is not None else ()
        self._loaded = {number: each for number, each in self._loaded.items() if number in kept}
        digests = tuple((number, each[-1].name.value) for number, each in self._loaded.items())
        replaced = tuple(
            (number, each.name.value)
            for number, loaded in self._loaded.items()
            for each in loaded
            if each.replaced_in == self._num_lists
        )
        return LoadedAdapterList(self._question, digests, self._num_lists, replaced)

    def note_acked(self, list_number: int) -> None:
        """The scheduler side's plans are made with that list from now on."""
        for loaded in self._loaded.values():
            loaded[:-1] = [each for each in loaded[:-1] if each.replaced_in > list_number]

    def names_of(self, number: int) -> tuple[Task[str], ...]:
        """Pending names of the adapters that were in memory under ``number`` since the scheduler
        side's last list, in order; the last is in memory. Empty if none is.
        """
        return tuple(each.name for each in self._loaded.get(number, ()))

    def close(self) -> None:
        self._stop()
        self._reads.close()
        self._manager = None

    def _load(self, manager: Any, request: LoRARequest, load: Callable[[], Any]) -> Any:
        """Replaces the loader's method."""
        if manager.lora_config is not self._lora_config:
            return load()
        folder = Path(get_adapter_absolute_path(request.lora_path))
        before = _stamp_or_none(folder)
        adapter = load()
        self._manager = manager
        loaded = self._loaded.setdefault(request.lora_int_id, [])
        is_same = bool(loaded) and before is not None
        if not (is_same and loaded[-1].stamp == before == _stamp_or_none(folder)):
            if loaded:
                loaded[-1].replaced_in = self._num_lists + 1
            name = self._reads.submit(lambda: self._read(folder, before, request.is_3d_lora_weight))
            loaded.append(_Loaded(before, name))
            self._has_changed = True
        return adapter

    def _read(self, folder: Path, stamp: AdapterStamp | None, is_3d: bool) -> str | None:
        try:
            return adapter_name(self._digests.digest(folder, stamp), is_3d) if stamp else None
        except OSError as error:
            logger.warning("The adapter that vLLM loaded from %s has no name: %s", folder, error)
            return None


def _stamp_or_none(folder: Path) -> AdapterStamp | None:
    try:
        return adapter_stamp(folder)
    except OSError:  # vLLM reports the problem
        return None


def _watch(on_load: Callable[[Any, LoRARequest, Callable[[], Any]], Any]) -> Callable[[], None]:
    """Call ``on_load(manager, request, load)`` whenever vLLM loads an adapter. Returns a function
    that ends this."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    original = vars(WorkerLoRAManager)[_LOAD]
    is_over = False

    @wraps(original)
    def watched(manager: Any, request: LoRARequest, *more: Any, **named: Any) -> Any:
        if is_over:
            return original(manager, request, *more, **named)
        return on_load(manager, request, lambda: original(manager, request, *more, **named))

    def stop() -> None:
        nonlocal is_over
        is_over = True
        if vars(WorkerLoRAManager).get(_LOAD) is watched:
            setattr(WorkerLoRAManager, _LOAD, original)

    setattr(WorkerLoRAManager, _LOAD, watched)
    return stop
