from __future__ import annotations

from pathlib import Path

import pytest

from examples.instance import VllmInstance, forks_from
from examples.tiny_model import build_tiny_model

VllmInstance.context = forks_from("tests.vllm_imports")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama and its tokenizer; see :mod:`examples.tiny_model`."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))
