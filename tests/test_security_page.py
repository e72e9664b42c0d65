"""What the security page promises names tests that exist."""

from __future__ import annotations

import re

from tests.support import ROOT


def test_every_promise_names_a_test_that_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text()))
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}
    assert len(named) > 10
    assert named <= defined
