"""Models whose KV follows several rules, under vLLM's real scheduler.

Every pass of a shadow rank reads what its layers attend to, and every job's bytes are compared: see
:mod:`tests.support.doubles.shadow_worker`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scheduler.test_adapter import Life, prompt
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.doubles.shadow_worker import Faults

CHUNK = 2 * BLOCK_SIZE
GEMMA = ("w40", "full", "w40")
_SHAPES = {
    "one window": Shape(groups=("w40",)),
    "one window, async, redis": Shape(groups=("w40",), depth=2, redis=True),
    "windows": Shape(groups=GEMMA, num_blocks=50),
    "windows, async": Shape(groups=GEMMA, depth=2, num_blocks=50),
    "windows, deep, redis": Shape(groups=GEMMA, depth=3, redis=True, num_blocks=50),
    "windows, two ranks": Shape(groups=GEMMA, world_size=2, redis=True, num_blocks=50),
    "windows, no prefix caching": Shape(groups=GEMMA, prefix_caching=False, num_blocks=50),
    "windows, zeroed": Shape(groups=GEMMA, zeroes=True, depth=2, num_blocks=44),
    "windows of two sizes": Shape(groups=("full", "w24", "w70"), redis=True, num_blocks=50),
    "windows, reused": Shape(groups=GEMMA, redis=True, admission="reused", num_blocks=50),
    "windows, audited": Shape(groups=GEMMA, audit_share=1.0, num_blocks=50),
    "chunked": Shape(groups=("c64", "full"), depth=2, redis=True, num_blocks=40),
    "chunked alone": Shape(groups=("c64",)),
    "narrow windows": Shape(groups=("full", "w10"), max_batched_tokens=48, num_blocks=40),
}
SHAPES = {name: replace(shape, tier_chunks=30) for name, shape in _SHAPES.items()}


def calm(model: Path, shape: Shape) -> ShadowEngine:
    return ShadowEngine(model, shape, 0, Faults(slow=0.0))


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("groups", [("w40",), GEMMA, ("full", "w24", "w70"), ("c64", "full")])
def test_the_same_prompt_is_loaded_but_for_its_last_chunk(
    model: Path, groups: tuple[str, ...], prefix_caching: bool
) -> None:
    shape = Shape(groups=groups, prefix_caching=prefix_caching, num_blocks=90, tier_chunks=60)
    engine = calm(model, shape)
    tokens = prompt(1, 8 * CHUNK)
    for length, hit in ((8 * CHUNK, 7), (8 * CHUNK - 1, 7), (7 * CHUNK + 1, 7), (7 * CHUNK, 6)):
        first = engine.add(tokens[:length], max_tokens=2)
        engine.run_until_idle()
        assert engine.scheduler.reset_prefix_cache()
        before = engine.adapter.tally.total("hit_tokens")
        again = engine.add(tokens[:length], max_tokens=2)
        engine.run_until_idle()
        assert engine.adapter.tally.total("hit_tokens") - before == hit * CHUNK, length
        assert engine.scheduler.reset_prefix_cache()
        for request_id in (first, again):
            engine.check_answer(request_id)
    engine.check_whole()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", SHAPES)
def test_random_lives_never_compute_on_wrong_kv(model: Path, name: str, seed: int) -> None:
    faults = Faults(
        failed_load=[0.0, 0.3, 1.0][seed % 3],
        no_memory=0.1 * (seed % 2),
        slow=[0.0, 0.5, 0.9][seed // 2 % 3],
    )
    engine = ShadowEngine(model, SHAPES[name], seed, faults)
    life = Life(engine, random.Random(seed))
    for _ in range(250):
        life.act()
    life.end()
    tally = engine.adapter.tally
    assert tally.total("store_jobs") > 0
    assert tally.total("load_jobs") > 0
