"""The functions that a hit and a store call: their number, and the architecture's picture.

A function counts once, on whatever thread it runs, properties too. What any request runs (arrival,
lookup, steps, metrics), even one too short to be loaded or stored, is "usual", and counts for
neither.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.engines.instance import VllmInstance
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import kv_transfer, random_prompt

MOST = {"hit": 120, "beside": 149, "store": 131}
"""Most distinct functions, without those of a request too short to be cached. Lower it with each
function that is removed."""
PRODUCT = (f"{ROOT}/lmcache_connector/", f"{ROOT}/storage/")
PROMPT_TOKENS = 600  # two chunks, and some tokens


class Trace:
    """The functions of the product that have run, as "file:function". Comprehensions and lambdas
    belong to the function around them."""

    def __init__(self) -> None:
        self.is_on = False
        self.functions: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not self.is_on or event != "call" or not code.co_filename.startswith(PRODUCT):
            return
        if not code.co_name.startswith("<"):
            name = f"{code.co_filename.removeprefix(f'{ROOT}/')}:{code.co_qualname}"
            self.functions.add(name)


TRACE = Trace()


def watch_threads() -> None:
    """Before the engine starts its threads."""
    threading.setprofile(TRACE)


def functions_run(probe: EngineProbe) -> dict[str, list[str]]:
    """Of a "hit" in CPU memory that is loaded inside the step that uses it, of one that is loaded
    "beside" steps, of a "store" to it, and what is "usual", in the engine's process.

    Raises ``AssertionError`` unless the cache was used.
    """
    warm, prompt = random_prompt(1, PROMPT_TOKENS), random_prompt(2, PROMPT_TOKENS)
    serve_twice(probe, warm)  # imports, and compiles
    usual, _ = traced(probe, [1, 2, 3])
    store, stored = traced(probe, prompt)
    probe.reset_prefix_cache()
    probe.drain()
    hit, loaded = traced(probe, prompt)
    probe.reset_prefix_cache()
    probe.drain()
    probe.connector._scheduler.policy.fits_in_step = lambda num_bytes: False
    beside, also_loaded = traced(probe, prompt)
    assert stored == 0
    assert loaded == also_loaded == PROMPT_TOKENS // 256 * 256
    ways = {"hit": hit, "beside": beside, "store": store}
    found = {"usual": usual} | {name: functions - usual for name, functions in ways.items()}
    return {name: sorted(functions) for name, functions in found.items()}


def serve_twice(probe: EngineProbe, prompt: Sequence[int]) -> None:
    probe.serve(prompt)
    probe.reset_prefix_cache()
    probe.drain()
    probe.serve(prompt)


def traced(probe: EngineProbe, prompt: Sequence[int]) -> tuple[set[str], int]:
    """The functions that run while the prompt is served, and the tokens that were loaded."""
    TRACE.functions, TRACE.is_on = set(), True
    sys.setprofile(TRACE)
    try:
        served = probe.serve(prompt, max_tokens=1)
    finally:
        sys.setprofile(None)
        TRACE.is_on = False
    return TRACE.functions, served.external_hit_tokens


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
