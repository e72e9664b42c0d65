"""The command line as a user calls it, inside this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from typer.testing import CliRunner

from lmcache_connector.cli.app import app


@dataclass(frozen=True)
class CliResult:
    """Exit code, stdout and stderr of one call."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one line of ``--json``."""
        (line,) = self.out.splitlines()
        document: dict[str, Any] = json.loads(line)
        return document


def transfer(**extra: Any) -> str:
    """The JSON of ``--kv-transfer-config`` for a small instance."""
    document = {"kv_connector": "LMCacheTieredConnector", "kv_role": "kv_both"}
    return json.dumps({**document, "kv_connector_extra_config": {"cpu_gib": 0.1, **extra}})


Cli: TypeAlias = Callable[..., CliResult]


def call_cli(*arguments: str, typed: str | None = None) -> CliResult:
    """Run one command. ``typed`` is what the user answers to questions."""
    result = CliRunner().invoke(app, arguments, input=typed, catch_exceptions=False)
    assert "Traceback" not in result.output
    return CliResult(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def cli() -> Cli:
    return call_cli
