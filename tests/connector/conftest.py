from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny_model import ModelShape, build_tiny_model

TINY = ModelShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=64,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=64,
    max_position=1024,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model as small as vLLM describes one; it is never run."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), TINY)
