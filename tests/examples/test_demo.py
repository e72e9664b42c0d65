"""The demo with a tiny model instead of the trained one: the same output."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.document import QUESTIONS, ask_about

NUM_WORDS = 1500
FULL_CHUNKS_TOKENS = 1408  # eleven chunks of 128; the questions begin in the twelfth


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """One token for each word."""
    path = tmp_path / "document.txt"
    path.write_text(" ".join(f"w{number % 997 + 2}" for number in range(NUM_WORDS)))
    return path


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_both_hits_are_hits_of_the_document(
    document: Path, tiny_model: Path, tmp_path: Path
) -> None:
    said = StringIO()
    outcome = ask_about(document, tiny_model, tmp_path, Console(file=said))
    shown = said.getvalue()
    assert [shown.count(question) for question in QUESTIONS] == [1, 1, 1]  # one answer to each
    for source in ("computed", "from the CPU tier", "from Valkey"):
        assert source in shown
    assert outcome.cold.hit_tokens == 0
    # One chunk of the first hit of each kind is audited, here or in the warm-up prompt.
    audited = {FULL_CHUNKS_TOKENS - 128, FULL_CHUNKS_TOKENS}
    assert {outcome.cpu.hit_tokens, outcome.redis.hit_tokens} <= audited
    assert outcome.kv_bytes_equal
