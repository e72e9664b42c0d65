"""LMCache's CUDA code was built for one torch, and another may be installed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from lmcache_connector.worker.lmcache_start import cuda_code_warning


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_a_gpu_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_code_warning() is None


@pytest.mark.usefixtures("on_a_gpu")
def test_code_that_does_not_load_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the wheel's own does here, where CUDA's libraries are not installed."""
    monkeypatch.setitem(sys.modules, "lmcache.cuda_ops", None)
    warning = cuda_code_warning()
    assert warning is not None
    assert "does not load" in warning
    assert torch.__version__ in warning


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("version", "is_told"), [("2.13.0+cu130", False), ("2.14.0", True), ("2.1.0", True)]
)
def test_another_torch_is_told(
    monkeypatch: pytest.MonkeyPatch, version: str, is_told: bool
) -> None:
    monkeypatch.setitem(sys.modules, "lmcache.cuda_ops", ModuleType("lmcache.cuda_ops"))
    monkeypatch.setattr(torch, "__version__", version)
    warning = cuda_code_warning()
    assert (warning is not None) == is_told
