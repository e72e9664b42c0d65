"""What ``check`` says of the versions that are installed."""

from __future__ import annotations

import pytest

from lmcache_connector.cli import check
from lmcache_connector.vllm_compat.api import versions


@pytest.mark.parametrize(
    ("vllm", "status", "words"),
    [
        ("0.32.0", "ok", ""),
        ("0.34.0", "warning", "not tested"),
        ("0.30.2", "error", "0.30.2 is installed"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, vllm: str, status: str, words: str) -> None:
    def version(name: str) -> str:
        return "0.5.6" if name == "lmcache" else vllm

    monkeypatch.setattr(check, "version", version)
    monkeypatch.setattr(versions, "version", version)
    finding = check.check_versions()
    assert finding.verdict == status
    assert words in finding.hint
    assert vllm in finding.detail
