"""The weights of an instance's model, and the worker that has them: a real one of vLLM's but for
what it computes with.

KV follows from the weights: ``version`` is what cells begin with. Versions above 0 came by an
update, followed by a reset.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker.worker_base import WorkerBase


class Weights:
    def __init__(self) -> None:
        self.version = 0
        self.model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        self.load(0)

    def load(self, version: int) -> None:
        """Other ones, or the same again, unseen by the connector. A reset of the cache follows."""
        self.version = version
        self.model.weight.fill_(version)


class Worker(WorkerBase):
    """Initialises a connector's worker side, as vLLM's worker does."""

    def __init__(self, weights: Weights) -> None:
        self.model_runner: Any = SimpleNamespace()
        self._model = weights.model

    def get_model(self) -> torch.nn.Module:
        return self._model

    def initialize(self, connector: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        connector.register_kv_caches(kv_caches)
