"""What is found of classes of vLLM's that are installed."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
from vllm.v1.worker.worker_base import WorkerBase

from tests.contract.installed import _members, installed


def test_a_field_is_found_where_another_initialiser_stands_before_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ours does before that of vLLM's workers."""
    original = WorkerBase.__init__

    @wraps(original)
    def made(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)

    monkeypatch.setattr(WorkerBase, "__init__", made)
    _members.cache_clear()
    found = installed("vllm.v1.worker.worker_base", "WorkerBase")
    assert found is not None
    assert "model_runner" in found.members
