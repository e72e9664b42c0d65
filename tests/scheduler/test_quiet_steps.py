"""A decode step that plans nothing costs next to nothing, however many requests decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.plans import StepPlan
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.frames import product_frames

MAX_FRAMES = 13
"""Of all calls that vLLM's scheduler makes in one step. It was 45, and 4 more for each request."""


def engine_of(model: Path, num_requests: int, shape: Shape) -> ShadowEngine:
    """All decode, and are in the middle of a block."""
    engine = ShadowEngine(model, shape, 0)
    for number in range(num_requests):
        name = engine.add([number] * (BLOCK_SIZE + 1), 6 * BLOCK_SIZE)
        engine.requests[name].sampling_params.stop_token_ids.clear()
    for _ in range(BLOCK_SIZE // 2 + 2 * shape.depth):
        engine.step()
    assert len(engine.scheduler.running) == num_requests
    return engine


def frames_of_a_step(engine: ShadowEngine) -> Counter[str]:
    """That vLLM's scheduler brings about; the step plans nothing."""
    frames: Counter[str] = Counter()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            outputs: list[Any] = []
            frames.update(product_frames(lambda: outputs.append(call(*args))))
            return outputs[0]

        return count

    scheduler = engine.scheduler
    calls = {name: getattr(scheduler, name) for name in ("schedule", "update_from_output")}
    for name, call in calls.items():
        setattr(scheduler, name, counted(call))
    engine.step()
    for name, call in calls.items():
        setattr(scheduler, name, call)
    assert engine.plans[-1] == StepPlan()
    return frames


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [("full",), ("full", "w32")])
def test_a_quiet_step_takes_few_frames(model: Path, groups: tuple[str, ...], depth: int) -> None:
    engine = engine_of(model, 3, Shape(num_blocks=200, groups=groups, depth=depth))
    frames = frames_of_a_step(engine)
    assert frames.total() <= MAX_FRAMES, frames


def test_requests_add_none(model: Path) -> None:
    shape = Shape(num_blocks=200)
    few, many = (frames_of_a_step(engine_of(model, count, shape)) for count in (1, 6))
    assert few == many
