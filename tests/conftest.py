from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama and its tokenizer; see :mod:`examples.tiny_model`."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))
