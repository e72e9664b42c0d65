"""Real engines for the tests, each in a process of its own, shared where tests allow it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.instance import VllmInstance
from examples.tiny_model import ModelShape, build_tiny_model
from tests.servers import Server, running_server, valkey_binary

BLOCK_SIZE = 128
CHUNK_SIZE = 2 * BLOCK_SIZE  # so that a hit can begin inside a chunk


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


def kv_transfer(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The JSON of ``--kv-transfer-config``. Hits are loaded, whatever that costs."""
    return {
        "kv_connector": "LMCacheTieredConnector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "cpu_gib": 0.25,
            "chunk_size": CHUNK_SIZE,
            "compute_or_load": "always",
            **extra,
        },
    }


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


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 2000) for _ in range(num_tokens)]
