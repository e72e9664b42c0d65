"""Weights that nobody changes, for workers without a model."""

from __future__ import annotations

from lmcache_connector.change_count import ChangeCount
from lmcache_connector.plans import WeightsInMemory
from lmcache_connector.vllm_compat.loaded_weights import LoadedWeights


class FixedWeights(LoadedWeights):
    def __init__(self) -> None:
        self.version = 0
        self.changes = ChangeCount()
        self.has_updates = True
        self._question = 0

    def ask(self, question: int) -> None:
        self._question, self.has_updates = question, True

    def take(self) -> WeightsInMemory | None:
        if not self.has_updates:
            return None
        self.has_updates = False
        return WeightsInMemory(answered=self._question)

    def close(self) -> None:
        self.changes.close()
