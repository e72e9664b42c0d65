"""Real engines for the tests, each in a process of its own, shared where tests allow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_settings import kv_transfer
from tests.support.instance import VllmInstance
from tests.support.servers import Server, running_server, valkey_binary
from tests.support.tiny_model import ModelShape, build_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(420))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), ModelShape())


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    with running_server(valkey_binary() or "valkey-server") as server:
        yield server


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VllmInstance]:
    """Makes an instance, to be used in a ``with``."""

    def make(
        transfer: dict[str, Any] | None = None, folder: Path = model, **engine_args: Any
    ) -> VllmInstance:
        log = tmp_path_factory.mktemp("instance") / "log"
        settings = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 8192} | engine_args
        return VllmInstance(folder, transfer or kv_transfer(), log, **settings)

    return make
