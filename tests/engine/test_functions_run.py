"""The functions that a hit and a store call: their number, and the architecture's picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.engines.functions_run import functions_run, watch_threads
from tests.support.engines.instance import VllmInstance
from tests.support.engines.settings import kv_transfer

MOST = {"hit": 120, "beside": 149, "store": 131}
"""Most distinct functions, without those of a request too short to be cached. Lower it with each
function that is removed."""


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    log = tmp_path_factory.mktemp("traced") / "log"
    with VllmInstance(
        tiny_model, kv_transfer(), log, watch_threads, max_model_len=8192
    ) as instance:
        answer: dict[str, list[str]] = instance.call(functions_run)
    return answer


@pytest.mark.parametrize("way", MOST)
def test_the_paths_stay_short(found: dict[str, list[str]], way: str) -> None:
    assert len(found[way]) <= MOST[way], found[way]


def test_the_picture_shows_real_calls(found: dict[str, list[str]]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (picture,) = re.findall(r"^```text\n(vLLM calls.*?)^```", page, re.MULTILINE | re.DOTALL)
    drawn = set(re.findall(r"\b[A-Z]\w+\.\w+", picture))
    run = {name.partition(":")[2] for functions in found.values() for name in functions}
    assert len(drawn) > 20
    assert drawn - run == set()
