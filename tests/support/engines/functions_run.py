"""Which functions of the product one hit and one store pass through: traced on a real engine.

    python -m tests.support.engines.functions_run

A function counts once, on whatever thread it runs, properties too. What a request runs that is too
short to be loaded or stored (arriving, being looked up, its steps, metrics) is "usual", and counts
for neither.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import random_prompt

_ROOT = str(Path(__file__).parents[3])
_PRODUCT = (f"{_ROOT}/lmcache_connector/", f"{_ROOT}/storage/")
_PROMPT_TOKENS = 600  # two chunks, and some tokens


class _Trace:
    """The functions of the product that have run, as "file:function". Comprehensions and lambdas
    belong to the function around them."""

    def __init__(self) -> None:
        self.is_on = False
        self.functions: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not self.is_on or event != "call" or not code.co_filename.startswith(_PRODUCT):
            return
        if not code.co_name.startswith("<"):
            name = f"{code.co_filename.removeprefix(f'{_ROOT}/')}:{code.co_qualname}"
            self.functions.add(name)


TRACE = _Trace()


def watch_threads() -> None:
    """Before the engine starts its threads."""
    threading.setprofile(TRACE)


def functions_run(probe: EngineProbe) -> dict[str, list[str]]:
    """Of a "hit" in CPU memory that is loaded inside the step that uses it, of one that is loaded
    "beside" steps, of a "store" to it, and what is "usual", in the engine's process.

    Raises ``AssertionError`` unless the cache was used.
    """
    warm, prompt = random_prompt(1, _PROMPT_TOKENS), random_prompt(2, _PROMPT_TOKENS)
    _serve_twice(probe, warm)  # imports, and compiles
    usual, _ = _traced(probe, [1, 2, 3])
    store, stored = _traced(probe, prompt)
    probe.reset_prefix_cache()
    probe.drain()
    hit, loaded = _traced(probe, prompt)
    probe.reset_prefix_cache()
    probe.drain()
    probe.connector._scheduler.policy.fits_in_step = lambda num_bytes: False
    beside, also_loaded = _traced(probe, prompt)
    assert stored == 0
    assert loaded == also_loaded == _PROMPT_TOKENS // 256 * 256
    ways = {"hit": hit, "beside": beside, "store": store}
    found = {"usual": usual} | {name: functions - usual for name, functions in ways.items()}
    return {name: sorted(functions) for name, functions in found.items()}


def _serve_twice(probe: EngineProbe, prompt: Sequence[int]) -> None:
    probe.serve(prompt)
    probe.reset_prefix_cache()
    probe.drain()
    probe.serve(prompt)


def _traced(probe: EngineProbe, prompt: Sequence[int]) -> tuple[set[str], int]:
    """The functions that run while the prompt is served, and the tokens that were loaded."""
    TRACE.functions, TRACE.is_on = set(), True
    sys.setprofile(TRACE)
    try:
        served = probe.serve(prompt, max_tokens=1)
    finally:
        sys.setprofile(None)
        TRACE.is_on = False
    return TRACE.functions, served.external_hit_tokens


def main() -> None:
    from examples.tiny_model import build_tiny_model
    from tests.support.engines.instance import VllmInstance
    from tests.support.engines.settings import kv_transfer

    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(Path(folder) / "model")
        log = Path(folder) / "log"
        with VllmInstance(model, kv_transfer(), log, watch_threads, max_model_len=8192) as instance:
            for name, functions in instance.call(functions_run).items():
                print(f"{name}: {len(functions)}", *functions, sep="\n  ")


if __name__ == "__main__":
    main()
