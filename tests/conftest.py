from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.instance import VllmInstance, forks_from
from tests.support.tiny_model import TINY, build_tiny_model

VllmInstance.context = forks_from("tests.support.vllm_imports")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama and its tokenizer; see :mod:`tests.support.tiny_model`."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model as small as vLLM describes one; it is never run."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), TINY)
