"""The command line as a user calls it, against a real Valkey."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from lmcache_connector.cli.app import app
from tests.support.servers import Server, running_server, valkey_binary


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one line of ``--json``."""
        (line,) = self.out.splitlines()
        document: dict[str, Any] = json.loads(line)
        return document


@pytest.fixture
def cli() -> Callable[..., Outcome]:
    def call(*arguments: str, typed: str | None = None) -> Outcome:
        result = CliRunner().invoke(app, arguments, input=typed, catch_exceptions=False)
        assert "Traceback" not in result.output
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture(scope="module")
def cli_valkey() -> Iterator[Server]:
    settings = {"maxmemory": "512mb", "maxmemory-policy": "allkeys-lru"}
    with running_server(valkey_binary() or "valkey-server", settings) as server:
        yield server


@pytest.fixture
def valkey(cli_valkey: Server) -> Server:
    with cli_valkey.client() as client:
        client.flushall()
    return cli_valkey
