"""Dials are watched, so that no test sleeps until one may have ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.peers import watched_dials


@pytest.fixture(autouse=True)
def _() -> Iterator[None]:
    with watched_dials():
        yield
