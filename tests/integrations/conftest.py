"""Every test here is of what is stored and loaded, not of how long a look-up may take."""

from __future__ import annotations

import pytest

from lmcache_connector.config import limits


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOOKUP_DEADLINE_SECONDS", 5.0)
