"""Real engines, each in its own process; tests of one file may share one."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.settings import kv_transfer
from tests.support.redis.servers import Server, running_valkey


def some_soak(names: Iterable[str], every_time: Container[str]) -> list[Any]:
    """Parameters; those not of ``every_time`` run in `make soak`: an engine takes 15 seconds to
    start."""
    return [pytest.param(n, marks=() if n in every_time else pytest.mark.soak) for n in names]


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    """Shared by the tests of one file."""
    with running_valkey() as server:
        yield server


@pytest.fixture(scope="module")
def start(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> StartInstance:
    """Starts engines, with the ``LIMITS`` of the tests' module if it has them."""
    limits: Mapping[str, float] = getattr(request.module, "LIMITS", {})

    def make(
        transfer: dict[str, Any] | None = None, folder: Path = tiny_model, **engine_args: Any
    ) -> VllmInstance:
        log = tmp_path_factory.mktemp("instance") / "log"
        settings = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 8192} | engine_args
        return VllmInstance(folder, transfer or kv_transfer(), log, limits=limits, **settings)

    return make
