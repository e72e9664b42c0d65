"""The command line, and a real Valkey for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.command_line import Cli, call_cli
from tests.support.redis.servers import CACHE, Server, running_valkey


@pytest.fixture
def cli() -> Cli:
    return call_cli


@pytest.fixture(scope="module")
def cli_valkey() -> Iterator[Server]:
    with running_valkey(CACHE) as server:
        yield server


@pytest.fixture
def valkey(cli_valkey: Server) -> Server:
    with cli_valkey.client() as client:
        client.flushall()
    return cli_valkey
