"""Keeps copies of KV that its owner may have written to meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from lmcache_connector.worker.step_gate import StepGate


class UnwrittenGate(StepGate):
    """What is copied of ``tensors`` passes if nobody has written to them since this was made, as
    torch counts writes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tuple(tensors)
        self._writes = writes_of(tensors)

    def passes(self, cancelled: threading.Event) -> bool:
        return super().passes(cancelled) and self._writes == writes_of(self._tensors)


def writes_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """How often each was written to; those made in inference mode do not say."""
    return [0 if each is None or each.is_inference() else each._version for each in tensors]
