"""When the weights of a rank are read, with a model in place of a worker's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(), get_model=lambda: model)
    weights = LoadedWeights(worker)
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


def test_weights_that_onednn_keeps_count_as_long_as_they_are_kept() -> None:
    class Handler:
        """As vLLM's: it may have attributes."""

    hidden = loaded_weights._HiddenWeights()
    make = hidden._digesting(lambda weight: Handler())
    kept = [make(torch.full((3,), float(number))) for number in range(3)]
    all_three = list(hidden.digests())
    assert len(set(all_three)) == 3
    del kept[1]
    assert list(hidden.digests()) == [all_three[0], all_three[2]]
