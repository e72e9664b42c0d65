"""Models whose KV follows several rules: what attacks on them found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.scheduler.test_adapter import prompt
from tests.scheduler.test_parts import CHUNK, WIDE, calm, serve
from tests.support.doubles.shadow_engine import ShadowEngine
from tests.support.doubles.shadow_worker import Faults


@pytest.mark.parametrize("groups", [("c64",), ("c64", "c96")])
def test_where_nothing_is_needed_there_is_no_load(model: Path, groups: tuple[str, ...]) -> None:
    """After a run of chunked attention: a load without a key would end the engine."""
    engine = calm(model, replace(WIDE, groups=groups, prefix_caching=False))
    for _ in range(2):
        serve(engine, prompt(1, 6 * CHUNK + 3))


def test_a_reset_that_preempts_is_not_refused_for_a_pin(model: Path) -> None:
    """Without the connector vLLM resets at any time with ``reset_running_requests``."""
    engine = ShadowEngine(model, WIDE, 0, Faults(stuck=True))
    engine.add(prompt(1, 6 * CHUNK), 3)
    for _ in range(3):
        engine.step()
    assert engine.adapter.held.num_pins
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
