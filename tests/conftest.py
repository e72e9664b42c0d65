"""Models and a server that tests of several rooms use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.instance import VllmInstance, forks_from
from tests.support.servers import Server, running_server, valkey_binary
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


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    """A Valkey that the tests of one file share."""
    with running_server(valkey_binary() or "valkey-server") as server:
        yield server
