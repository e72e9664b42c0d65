"""The tool, on a product of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mutants.catalog import load
from tests.mutants.command import main
from tests.support import ROOT

_LIST = """
[found]
kind = 'slip'
file = 'lmcache_connector/sums.py'
breaks = 'sums'
old = 'a + b'
new = 'a - b'

[missed]
kind = 'slip'
file = 'lmcache_connector/sums.py'
breaks = 'nothing'
old = 'a + b'
new = 'b + a'

[stale]
kind = 'slip'
file = 'lmcache_connector/sums.py'
breaks = 'what is gone'
old = 'a * b'
new = 'a + b'
"""


def _tree(root: Path) -> None:
    files = {
        "lmcache_connector/__init__.py": "",
        "lmcache_connector/sums.py": "def add(a, b):\n    return a + b\n",
        "tests/__init__.py": "",
        "tests/test_sums.py": (
            "from lmcache_connector.sums import add\n\ndef test_add():\n    assert add(2, 1) == 3\n"
        ),
        "tests/mutants/mutants.toml": _LIST,
        "pyproject.toml": (
            "[tool.pytest.ini_options]\nmarkers = ['engine: .', 'soak: .', 'cuda: .']\n"
        ),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_every_listed_bug_can_be_planted() -> None:
    for mutant in load(ROOT):
        mutant.plant((ROOT / mutant.file).read_text())


def test_each_bug_is_planted_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _tree(tmp_path)
    assert main(["--json", "-", "--write", "--jobs", "1"], tmp_path, ()) == 1
    said = capsys.readouterr().out.splitlines()
    assert json.loads(said[-1]) == {
        "planted": 2,
        "found": 1,
        "missed": ["missed"],
        "stale": ["stale"],
    }
    assert any(line.startswith("found") and "tests/test_sums.py::test_add" in line for line in said)
    assert "| `found` | slip | sums |" in (tmp_path / "tests/MUTANTS.md").read_text()
    assert "a + b" in (tmp_path / "lmcache_connector/sums.py").read_text()
    assert main(["found"], tmp_path, ()) == 0
    assert capsys.readouterr().out == "1 planted, 1 found; missed: none\n", "known by now"
    assert main(["nothing/like/it"], tmp_path, ()) == 2
