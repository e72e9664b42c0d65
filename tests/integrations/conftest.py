"""These tests are about stored and loaded bytes, not about the time of a lookup."""

from __future__ import annotations

import pytest

from lmcache_connector.config import limits


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOOKUP_DEADLINE_SECONDS", 5.0)
