"""The tests that `tests/PROMISES.md` names for security promises exist."""

from __future__ import annotations

import re

from tests.support import ROOT


def test_every_promise_names_a_test_that_exists() -> None:
    page = (ROOT / "tests" / "PROMISES.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert all("`" in row or row.startswith("| promise") for row in rows)
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}
    assert len(named) > 10
    assert named <= defined
    assert all((ROOT / path).is_file() for path in re.findall(r"`(tests/[\w/]+\.py)`", page))
