from __future__ import annotations

import pytest

from tests.support.command_line import Cli, call_cli


@pytest.fixture
def cli() -> Cli:
    return call_cli
