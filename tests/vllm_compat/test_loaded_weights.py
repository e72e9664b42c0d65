"""When the weights of a rank are read, with a model in place of a worker's."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.worker.worker_base import WorkerBase

from lmcache_connector.errors import ConfigError
from lmcache_connector.plans import WeightsInMemory
from lmcache_connector.vllm_compat import loaded_weights
from lmcache_connector.vllm_compat.loaded_weights import LoadedWeights, watch_loading
from lmcache_connector.vllm_compat.tensor_digest import model_digest
from tests.support.engines.settings import kv_transfer
from tests.support.vllm_configs import vllm_config


def test_a_storm_of_resets_leaves_no_queue_of_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on, whole = threading.Event(), threading.Event(), list[bool]()

    def slow(models: Any, packed: Any, is_over: Callable[[], bool]) -> str | None:
        started.set()
        go_on.wait(30)
        digest = model_digest(models, packed, is_over)
        whole.append(digest is not None)
        return digest

    monkeypatch.setattr(loaded_weights, "model_digest", slow)
    model = torch.nn.Linear(4, 6)
    weights = LoadedWeights(rank_of(model))
    assert started.wait(30)
    for question in range(1, 21):
        weights.ask(question)
    go_on.set()
    assert weights._reading.wait(30)
    told = weights.take()
    weights.close()
    assert told is not None
    assert told.answered == 20
    assert told.digest == told.first_digest is not None
    assert sum(whole) == 2, "what was loaded at start, and what the last reset asks for"


def test_an_update_ends_the_first_read_also_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer resets a new engine and updates it at once: weights after the call are not those of
    the files."""
    started, go_on = threading.Event(), threading.Event()

    def slow(models: Any, packed: Any, is_over: Callable[[], bool]) -> str | None:
        started.set()
        go_on.wait(30)
        return model_digest(models, packed, is_over)

    monkeypatch.setattr(loaded_weights, "model_digest", slow)
    model = torch.nn.Linear(4, 6)  # written as vLLM's loaders do
    worker = rank_of(model, update_weights=lambda: model.weight.data.add_(1.0))
    weights = LoadedWeights(worker)
    assert started.wait(30)
    weights.ask(1)
    worker.update_weights()
    go_on.set()
    told = told_of(weights)
    weights.close()
    assert told.digest == model_digest({"model": model}, ())
    assert told.first_digest is None


def rank_of(model: torch.nn.Module, **calls: Any) -> Any:
    """A worker that has this model."""
    return SimpleNamespace(model_runner=SimpleNamespace(), get_model=lambda: model, **calls)


def told_of(weights: LoadedWeights) -> WeightsInMemory:
    assert weights._reading.wait(30)
    told = weights.take()
    assert told is not None
    return told


def test_a_worker_tells_when_it_was_made(model: Path) -> None:
    watch_loading()
    config, started = vllm_config(model), time.time()
    config.kv_transfer_config = KVTransferConfig(**kv_transfer())
    worker: Any = WorkerBase(config, 0, 0, "")
    vars(worker).update(vars(rank_of(torch.nn.Linear(4, 6))))
    weights = LoadedWeights(worker)
    told = told_of(weights)
    weights.close()
    assert started <= told.loaded_after <= time.time()


def test_a_mistake_in_the_settings_ends_the_start_of_a_worker(model: Path) -> None:
    watch_loading()
    config = vllm_config(model)
    config.kv_transfer_config = KVTransferConfig(**kv_transfer(cpu_gb=1))
    with pytest.raises(ConfigError, match="did you mean 'cpu_gib'"):
        WorkerBase(config, 0, 0, "")


@pytest.mark.parametrize("num_writes", [1, 2])
def test_weights_that_are_written_while_they_are_read_are_read_again(
    monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    """By a function of the user's, of which vLLM knows nothing."""
    model, left = torch.nn.Linear(4, 6), [num_writes]

    def torn(models: Any, *args: Any) -> str | None:
        digest = model_digest(models, *args)
        if left[0]:
            left[0] -= 1
            with torch.inference_mode():
                model.weight.add_(1.0)
        return digest

    monkeypatch.setattr(loaded_weights, "model_digest", torn)
    weights = LoadedWeights(rank_of(model))
    told = told_of(weights)
    assert told.digest == model_digest({"model": model}, ())
    assert told.first_digest is None, "the files may have given others"
    assert told.is_visible
    weights.ask(1)
    assert told_of(weights).digest == told.digest
    weights.close()


def test_weights_that_are_written_all_the_time_have_no_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(4, 6)

    def torn(models: Any, *args: Any) -> str | None:
        with torch.no_grad():
            model.weight.add_(1.0)
        return model_digest(models, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loaded_weights, "model_digest", torn)
        weights = LoadedWeights(rank_of(model))
        told = told_of(weights)
        assert (told.first_digest, told.is_visible) == (None, False)
    weights.ask(1)
    assert told_of(weights).digest == model_digest({"model": model}, ())
    weights.close()


def test_calls_that_come_in_every_step_do_not_have_the_weights_read_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each raises a doubt, until the weights were read after it. Reads take a second here."""
    now, num_reads = [0.0], [0]

    def slow(models: Any, *args: Any) -> str | None:
        now[0] += 1.0
        num_reads[0] += 1
        return model_digest(models, *args)

    monkeypatch.setattr(loaded_weights, "model_digest", slow)
    worker = rank_of(torch.nn.Linear(4, 6), apply_model=lambda look: look())
    weights = LoadedWeights(worker, lambda: now[0])
    as_loaded = told_of(weights).digest
    for _ in range(20):
        worker.apply_model(lambda: None)
        weights._reading.wait(0.05)
    assert num_reads[0] == 1, "after a read there is a pause"
    told = weights.take()
    assert told is not None
    assert told.digest is None, "requests compute until it is known"
    weights.ask(1)
    assert told_of(weights).digest == as_loaded, "a reset does not wait"
    now[0] += 10.0
    worker.apply_model(lambda: None)
    assert told_of(weights).digest == as_loaded
    weights.close()


class Handler:
    """As vLLM's: it may have attributes."""


def of_16_bits(module: torch.nn.Module, handler: Handler) -> None:
    vars(module)["cpu_linear"] = lambda x: (x, handler)


def of_8_bits(module: torch.nn.Module, handler: Handler) -> None:
    vars(module)["scheme"] = SimpleNamespace(kernel=SimpleNamespace(dnnl_handler=handler))


@pytest.mark.parametrize("put", [of_16_bits, of_8_bits])
def test_weights_that_onednn_keeps_count_by_the_layer_that_has_them(
    put: Callable[[torch.nn.Module, Handler], None],
) -> None:
    hidden = loaded_weights._HiddenWeights()
    make = hidden._digesting(lambda weight: Handler())
    layers = [torch.nn.Linear(0, 0, bias=False) for _ in range(3)]
    model = {"model": torch.nn.Sequential(*layers)}

    def digests(*order: int) -> list[bytes]:
        """With the layers made anew, in whatever order a reload does that."""
        for number in order:
            put(layers[number], make(torch.full((3,), float(number))))
        return list(hidden.digests(model, 0.0))

    as_loaded = digests(0, 1, 2)
    assert len(set(as_loaded)) == 3
    assert digests(2, 0, 1) == digests(1, 2, 0) == as_loaded
    put(layers[0], make(torch.full((3,), 1.0)))
    put(layers[1], make(torch.full((3,), 0.0)))
    assert list(hidden.digests(model, 0.0)) != as_loaded


def test_weights_of_an_earlier_engine_do_not_count_nor_those_that_are_gone() -> None:
    hidden = loaded_weights._HiddenWeights()
    make = hidden._digesting(lambda weight: Handler())
    kept = [make(torch.full((3,), float(number))) for number in range(3)]
    all_three = list(hidden.digests({}, 0.0))
    assert len(set(all_three)) == 3
    del kept[1]
    assert list(hidden.digests({}, 0.0)) == [all_three[0], all_three[2]]
    assert not list(hidden.digests({}, float("inf")))


def test_layers_that_a_drafter_has_dropped_do_not_count_once_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes those of the model. The dropped ones refer to themselves: Python may free them much
    later, and the name of the weights would change with it."""
    hidden = loaded_weights._HiddenWeights()
    hidden.is_watched = True
    monkeypatch.setattr(loaded_weights, "_hidden", hidden)
    make = hidden._digesting(lambda weight: Handler())
    model, dropped = (torch.nn.Sequential(torch.nn.Linear(0, 0, bias=False)) for _ in range(2))
    of_16_bits(model[0], make(torch.ones(3)))
    of_16_bits(dropped[0], make(torch.zeros(3)))
    vars(dropped)["itself"] = dropped
    gc.disable()
    try:
        del dropped
        weights = LoadedWeights(rank_of(model))
        assert told_of(weights).digest == model_digest(
            {"model": model}, list(hidden.digests({"model": model}, 0.0))[:1]
        )
    finally:
        gc.enable()
    weights.close()


def test_weights_that_cannot_be_read_for_a_while_have_their_name_again() -> None:
    """In the middle of an update they may be on no device."""
    model = torch.nn.Linear(4, 6)
    weights = LoadedWeights(rank_of(model))
    found = []
    for question, device in enumerate(("cpu", "meta", "cpu")):
        if device == "meta":
            as_loaded, model.weight = model.weight, torch.nn.Parameter(model.weight.to("meta"))
        elif question:
            model.weight = as_loaded
        weights.ask(question)
        assert weights._reading.wait(30)
        told = weights.take()
        assert told is not None
        found.append((told.digest, told.is_visible))
    weights.close()
    assert found[0] == found[2]
    assert [is_visible for _, is_visible in found] == [True, False, True]


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_update_of_several_calls_is_read_at_its_end(is_whole: bool) -> None:
    """No call announces what its backend writes between two calls, on a thread of its own."""
    model, steps = torch.nn.Linear(4, 6), list[str]()

    def step(name: str) -> None:
        steps.append(name)
        worker._weight_update_active = name != steps_end
        if name == "update_weights" and not is_whole:
            raise RuntimeError("the trainer is gone")

    steps_end = "finish_weight_update" if is_whole else "update_weights"
    calls = ("start_weight_update", "update_weights", "finish_weight_update")
    worker = rank_of(model, **{name: partial(step, name) for name in calls})
    weights = LoadedWeights(worker)
    first = told_of(weights)
    worker.start_weight_update()
    weights.ask(1)
    model.weight.data.add_(1.0)
    with pytest.raises(RuntimeError) if not is_whole else nullcontext():
        assert told_of_now(weights).digest is None
        worker.update_weights()
        assert told_of_now(weights).digest is None
        worker.finish_weight_update()
    told = told_of(weights)
    weights.close()
    assert steps[-1] == steps_end
    assert (told.answered, told.digest) == (1, told_of_other(model))
    assert told.digest != first.digest


def told_of_now(weights: LoadedWeights) -> WeightsInMemory:
    """What is told once all reads begun so far have ended."""
    assert weights._reads.submit(lambda: None).wait(30)
    told = weights.take()
    assert told is not None
    return told


def told_of_other(model: torch.nn.Module) -> str | None:
    """The digest of a worker that has never had other weights."""
    weights = LoadedWeights(rank_of(model))
    told = told_of(weights)
    weights.close()
    return told.digest


def test_sleep_takes_memory_away_once_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, is_read, were_read = torch.nn.Linear(4, 6), threading.Event(), list[bool]()

    def slow(models: Any, packed: Any, is_over: Callable[[], bool]) -> None:
        is_read.set()
        while not is_over():
            time.sleep(0.001)
        time.sleep(0.05)  # in the middle of a tensor
        is_read.clear()

    worker = rank_of(
        model, sleep=lambda level: were_read.append(is_read.is_set()), wake_up=lambda tags: None
    )
    with monkeypatch.context() as patch:
        patch.setattr(loaded_weights, "model_digest", slow)
        weights = LoadedWeights(worker)
        assert is_read.wait(30)
        worker.sleep(1)
    assert were_read == [False]
    weights.ask(1)
    for tag in ("kv_cache", "weights"):
        assert told_of_now(weights).digest is None
        worker.wake_up(tags=[tag])
    told = told_of(weights)
    weights.close()
    assert (told.answered, told.digest) == (1, told_of_other(model))


def test_weights_are_not_read_while_waking_up_has_failed() -> None:
    """On a GPU their addresses may be unmapped: a read of them would end the engine."""
    model, has_room = torch.nn.Linear(4, 6), [False]

    def wake_up(tags: list[str] | None = None) -> None:
        if not has_room[0]:
            raise RuntimeError("out of memory")

    worker = rank_of(model, sleep=lambda level: None, wake_up=wake_up)
    weights = LoadedWeights(worker)
    first = told_of(weights)
    worker.sleep(1)
    with pytest.raises(RuntimeError):
        worker.wake_up()
    weights.ask(1)
    assert told_of_now(weights).digest is None
    has_room[0] = True
    worker.wake_up()
    assert told_of(weights).digest == first.digest
    weights.close()
