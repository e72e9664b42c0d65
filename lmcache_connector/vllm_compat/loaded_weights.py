"""Digests the weights that one rank has in memory, after loading and after possible changes.

vLLM does not report its weights to a connector. The worker that initialises a connector is found on
the call stack; its methods that may change weights, and its models' ``load_weights``, are replaced
on these objects. Other changes are found at the next reset of vLLM's prefix cache, when the
scheduler side asks all ranks.
"""

from __future__ import annotations

import gc
import logging
import platform
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import psutil
import torch

from lmcache_connector.change_count import ChangeCount
from lmcache_connector.config.tiered import check_settings
from lmcache_connector.plans import WeightsInMemory
from lmcache_connector.threads import Background, Task
from lmcache_connector.vllm_compat.api.versions import VLLM_PACKAGE, installed_version
from lmcache_connector.vllm_compat.tensor_digest import (
    closure,
    has_hidden_weights,
    model_digest,
    model_form,
    model_stamp,
    tensor_digest,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerBase

logger = logging.getLogger(__name__)

_MAY_CHANGE_WEIGHTS = (
    "apply_model",
    "elastic_ep_execute",
    "finish_weight_update",
    "load_model",
    "reload_weights",
    "reset_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
)
_MADE_AT = "_lmcache_connector_made_at"
_WORKER = "_lmcache_connector_worker"
_DIGEST = "_lmcache_connector_digest"
_UNSHOWN = b"shown by no layer: "
_LET_GO_SECONDS = 30.0
# Calls that may change weights can come in every step: reads due to calls take a tenth of the
# time. Reads due to a reset do not wait.
_REST_PER_READ = 9.0
_MAX_TORN_READS = 3


class LoadedWeights:
    """Digests of the weights of ``worker``; ``None``: a worker whose weights cannot be seen.

    ``has_updates``: a plain attribute, cheap to poll every step. Runs on the worker's thread;
    another thread reads the weights.
    """

    def __init__(
        self, worker: WorkerBase | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker = worker
        self._made_at: float = getattr(worker, _MADE_AT, None) or 0.0
        self._clock = clock
        self._rest_until = clock()
        self._models = _models_of(worker) if worker is not None else {}
        self._is_visible = bool(self._models) and (
            _hidden.is_watched or not has_hidden_weights(self._models)
        )
        self._form = f"{_device(self._models)} {model_form(self._models)}"
        self._reads = Background("lmc-weights")
        self._reading: Task[str] = Task()
        self._num_reads = 0
        self._superseded = threading.Event()  # ends the last read
        self._first_digest: str | None = None
        self._is_unreadable = False
        self._question = 0
        self._num_calls = 0  # in progress, nested
        self._is_asleep = False
        self._put_back: list[Callable[[], None]] = []
        self._watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.changes = ChangeCount()
        self.has_updates = True
        if worker is not None:
            self._watch(worker)
            _hidden.collect(self._models, self._made_at)
        self._read()

    def ask(self, question: int) -> None:
        """Read the weights again, since they may have changed unseen; once per question."""
        if question != self._question:
            self._question = question
            self._read(is_asked=True)

    def take(self) -> WeightsInMemory | None:
        """The state of the weights, if it changed since the last call."""
        if not self.has_updates:
            return None
        self.has_updates = False
        return WeightsInMemory(
            version=self.changes.number,
            answered=self._question,
            digest=self._reading.value if self._reading.is_done else None,
            first_digest=self._first_digest,
            is_visible=self._is_visible and not self._is_unreadable,
            form=self._form,
            loaded_after=self._made_at or psutil.Process().create_time(),
        )

    def close(self) -> None:
        for put_back in self._put_back:
            put_back()
        self._superseded.set()
        self.changes.add()  # ends a read in progress
        self._reads.close()
        self.changes.close()

    # -- details -------------------------------------------------------------------------------

    def _watch(self, worker: Any) -> None:
        for name in _MAY_CHANGE_WEIGHTS:
            self._wrap(worker, name, self._around)
        self._wrap(worker.model_runner, "reload_weights", self._around)
        self._wrap(worker, "sleep", self._around_sleep)
        self._wrap(worker, "wake_up", self._around_wake_up)
        self._watch_models(worker)

    def _watch_models(self, worker: Any) -> None:
        self._models = _models_of(worker)
        for model in self._models.values():
            if model not in self._watched:  # others may watch it too
                self._watched.add(model)
                self._wrap(model, "load_weights", self._around)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        call = getattr(owner, name, None)
        if call is None:
            return

        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return around(partial(call, *args, **kwargs), *args, **kwargs)

        object.__setattr__(owner, name, watched)
        self._put_back.append(lambda: vars(owner).pop(name, None))

    def _around(self, call: Callable[[], Any], *_: Any, **__: Any) -> Any:
        self.changes.add()
        self._num_calls += 1
        self._read()
        try:
            return call()
        finally:
            self.changes.add()
            self._num_calls -= 1
            if not self._num_calls:
                self._watch_models(self._worker)
                self._read()

    def _around_sleep(self, call: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """The call may release the weights' memory: nothing reads them until they are back."""
        self._is_asleep = True
        self._read()
        self._reads.submit(lambda: None).wait(_LET_GO_SECONDS)  # behind a read that is ending
        return self._around(call)

    def _around_wake_up(
        self, call: Callable[[], Any], tags: list[str] | None = None, **__: Any
    ) -> Any:
        """If the call raises, the weights may still be without memory: they count as asleep."""
        found = self._around(call)
        if self._is_asleep and (tags is None or "weights" in tags):
            self._is_asleep = False
            self._read()
        return found

    def _read(self, *, is_asked: bool = False) -> None:
        """Start reading the weights, if they are in memory and no call is changing them. Discards
        the result of earlier reads."""
        if not (is_asked and self._num_reads == 1):  # questions do not end the first read
            self._superseded.set()
        self._num_reads += 1
        self._reading = Task()
        self.has_updates = True
        # Some backends of weight updates write on their own threads until the update ends.
        is_updating = getattr(self._worker, "_weight_update_active", False)
        if self._is_asleep or self._num_calls or is_updating:
            return
        number, models, fence = self.changes.number, self._models, _fence(self._models)
        is_first = self._num_reads == 1
        superseded = self._superseded = threading.Event()

        def is_over() -> bool:
            is_changed = self.changes.number != number
            return superseded.is_set() or is_changed or self._is_asleep

        def read() -> str | None:
            if not is_asked:
                superseded.wait(max(0.0, self._rest_until - self._clock()))
            if is_over():
                return None
            started = self._clock()
            try:
                digest, is_torn = self._whole_digest(models, fence, is_over)
                self._is_unreadable = False
            except Exception as error:  # noqa: BLE001 - weights may be missing during an update
                logger.warning("The weights in memory cannot be read: %s", error)
                self._is_unreadable, is_torn = True, True
                digest = f"unseen:{uuid.uuid4().hex}"
            now = self._clock()
            self._rest_until = max(self._rest_until, now + _REST_PER_READ * (now - started))
            if is_over():
                return None
            if is_first and not is_torn:
                self._first_digest = digest
            return digest

        def tell() -> None:
            self.has_updates = True

        self._reading = self._reads.submit(read, tell)

    def _whole_digest(
        self, models: dict[str, torch.nn.Module], fence: Any, is_over: Callable[[], bool]
    ) -> tuple[str | None, bool]:
        """Returns the digest, and whether weights were written meanwhile and so read again."""
        for number in range(_MAX_TORN_READS):
            before = model_stamp(models)
            digest = self._digest(models, fence, is_over)
            if is_over() or model_stamp(models) == before:
                return digest, number > 0
        raise RuntimeError(f"they were written during each of {_MAX_TORN_READS} reads")

    def _digest(
        self, models: dict[str, torch.nn.Module], fence: Any, is_over: Callable[[], bool]
    ) -> str | None:
        if not self._is_visible:
            return f"unseen:{uuid.uuid4().hex}"
        packed = _hidden.digests(models, self._made_at)
        if fence is None:
            return model_digest(models, packed, is_over)
        with torch.cuda.device(fence.device), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_event(fence)
            return model_digest(models, packed, is_over)


def worker_on_stack() -> WorkerBase | None:
    """vLLM's worker that is initialising this connector; ``None`` without one."""
    workers = sys.modules.get("vllm.v1.worker.worker_base")
    frame = sys._getframe()
    while workers is not None and frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, workers.WorkerBase):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def watch_loading() -> None:
    """Make each worker check the connector's settings, note its creation time, and digest weights
    that vLLM hands to oneDNN. Called in every process of vLLM before models are loaded; does not
    import vLLM's workers."""
    workers = sys.modules.get("vllm.v1.worker.worker_base")
    if workers is not None and _MADE_AT not in vars(workers.WorkerBase):
        init = workers.WorkerBase.__init__

        @wraps(init)
        def made(worker: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
            if (transfer := vllm_config.kv_transfer_config) is not None:
                check_settings(vars(transfer), vllm_config.cache_config.block_size)
            _hidden.worker_made_at = time.time()
            setattr(worker, _MADE_AT, _hidden.worker_made_at)
            init(worker, vllm_config, *args, **kwargs)

        setattr(workers.WorkerBase, _MADE_AT, None)
        workers.WorkerBase.__init__ = made
    _hidden.watch()


class _HiddenWeights:
    """Weights that oneDNN keeps, digested when handed over; they do not change afterwards. One per
    process, since it replaces functions of a vLLM module.
    """

    _MAKERS = ("create_onednn_mm", "create_onednn_scaled_mm")

    def __init__(self) -> None:
        self._handlers: list[weakref.ref[Any]] = []
        self.is_watched = False
        self.worker_made_at: float | None = None
        """Creation time of the process's latest worker, whose layers are being loaded."""

    def watch(self) -> None:
        from vllm.platforms import current_platform

        if self.is_watched or not current_platform.is_cpu():
            return
        self.is_watched = True
        from vllm import _custom_ops

        for name in self._MAKERS:
            setattr(_custom_ops, name, self._digesting(getattr(_custom_ops, name)))

    def digests(self, models: dict[str, torch.nn.Module], since: float) -> Iterator[bytes]:
        """Digests of layers by module name, since a reload changes their order; then, in order of
        creation, of layers made after ``since`` that no module refers to."""
        shown = set()
        for title, model in models.items():
            for name, module in model.named_modules():
                for handler in _kept_by(module):
                    if (found := getattr(handler, _DIGEST, None)) is not None:
                        shown.add(id(handler))
                        yield f"{title}/{name}: ".encode() + found
        for each in tuple(self._handlers):  # the worker's thread may append
            handler = each()
            if handler is None or id(handler) in shown or getattr(handler, _MADE_AT) < since:
                continue
            worker = getattr(handler, _WORKER)  # maybe of another engine in this process
            if since and worker not in {None, since}:
                continue
            yield _UNSHOWN + getattr(handler, _DIGEST)

    def collect(self, models: dict[str, torch.nn.Module], since: float) -> None:
        """Free a drafter's own layers that were replaced by the model's: reference cycles keep them
        alive, and their digests would count until garbage collection."""
        if any(each.startswith(_UNSHOWN) for each in self.digests(models, since)):
            gc.collect()

    def _digesting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def watched(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            scales = [each for each in args if isinstance(each, torch.Tensor)]
            found = b"".join(tensor_digest(each) for each in (weight, *scales))
            handler = make(weight, *args, **kwargs)
            setattr(handler, _DIGEST, found)
            setattr(handler, _MADE_AT, time.time())
            setattr(handler, _WORKER, self.worker_made_at)
            self._handlers.append(weakref.ref(handler, self._handlers.remove))
            return handler

        return watched


_hidden = _HiddenWeights()


def _kept_by(module: torch.nn.Module) -> Iterator[Any]:
    """Objects that a layer computes with, some of them oneDNN handlers; those of 8-bit layers are
    in the kernel of their scheme."""
    kept = vars(module)
    yield from closure(kept.get("cpu_linear"))
    yield getattr(getattr(kept.get("scheme"), "kernel", None), "dnnl_handler", None)


def _models_of(worker: Any) -> dict[str, torch.nn.Module]:
    runner = worker.model_runner
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    found = {"model": worker.get_model(), "drafter": getattr(drafter, "model", None)}
    return {name: model for name, model in found.items() if isinstance(model, torch.nn.Module)}


def _device(models: dict[str, torch.nn.Module]) -> str:
    """Machine and versions, which decide how vLLM keeps weights in memory."""
    parameter = next((p for model in models.values() for p in model.parameters()), None)
    if parameter is not None and parameter.is_cuda:
        name = torch.cuda.get_device_name(parameter.device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    vllm = installed_version(VLLM_PACKAGE)
    return f"{platform.node()} {name} torch {torch.__version__} vllm {vllm}"


def _fence(models: dict[str, torch.nn.Module]) -> Any:
    """An event behind all writes of weights queued on a GPU; ``None`` on a CPU."""
    parameter = next((p for model in models.values() for p in model.parameters()), None)
    if parameter is None or not parameter.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(parameter.device))
    return event
