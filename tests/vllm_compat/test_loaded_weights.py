"""When the weights of a rank are read, with a model in place of a worker's."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_connector.plans import WeightsInMemory
from lmcache_connector.vllm_compat import loaded_weights
from lmcache_connector.vllm_compat.loaded_weights import LoadedWeights
from lmcache_connector.vllm_compat.tensor_digest import model_digest


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
    assert told.question == 20
    assert told.digest == told.first_digest is not None
    assert sum(whole) == 2, "what was loaded at start, and what the last reset asks for"


def rank_of(model: torch.nn.Module, **calls: Any) -> Any:
    """A worker that has this model."""
    return SimpleNamespace(model_runner=SimpleNamespace(), get_model=lambda: model, **calls)


def told_of(weights: LoadedWeights) -> WeightsInMemory:
    assert weights._reading.wait(30)
    told = weights.take()
    assert told is not None
    return told


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
    assert num_reads[0] == 1, "since then it rests"
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


def linear_on_onednn(hidden: Any, number: float) -> torch.nn.Module:
    """A layer whose weights only its closure's handler has."""
    module = torch.nn.Linear(0, 0, bias=False)
    handler = hidden._digesting(lambda weight: Handler())(torch.full((3,), number))
    vars(module)["cpu_linear"] = lambda x: (x, handler)
    return module


def test_weights_that_onednn_keeps_count_by_the_layer_that_has_them() -> None:
    hidden = loaded_weights._HiddenWeights()
    layers = [linear_on_onednn(hidden, number) for number in range(3)]
    model = {"model": torch.nn.Sequential(*layers)}
    as_loaded = list(hidden.digests(model, 0.0))
    assert len(set(as_loaded)) == 3
    for order in ((2, 0, 1), (1, 2, 0)):  # a reload makes them anew, in whatever order
        for number in order:
            vars(layers[number])["cpu_linear"] = vars(linear_on_onednn(hidden, number))[
                "cpu_linear"
            ]
        assert list(hidden.digests(model, 0.0)) == as_loaded
    swapped = [vars(layers[number])["cpu_linear"] for number in (1, 0)]
    for number in range(2):
        vars(layers[number])["cpu_linear"] = swapped[number]
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
    model, dropped = (torch.nn.Sequential(linear_on_onednn(hidden, n)) for n in (1.0, 2.0))
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
