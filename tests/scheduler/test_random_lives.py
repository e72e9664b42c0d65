"""The scheduler side under vLLM's real scheduler, over long random lives of many requests.

Every block access of every job is checked, and every chunk that is stored or loaded is compared
with what its key names: see :mod:`tests.support.doubles.shadow_worker`. Whether these lives would
notice is what the planted bugs are for: `tests/MUTANTS.md`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_connector.metrics.samples import split_key
from lmcache_connector.metrics.table import METRICS
from tests.support.doubles.lives import Life, filled_engine
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.doubles.shadow_worker import Faults

GEMMA = ("w40", "full", "w40")
SHAPES = {
    "plain": Shape(),
    "async": Shape(depth=2),
    "deep": Shape(depth=3, redis=True),
    "two ranks": Shape(world_size=2),
    "two ranks, async, redis": Shape(world_size=2, depth=2, redis=True),
    "redis": Shape(redis=True),
    "no prefix caching": Shape(prefix_caching=False, redis=True),
    "three blocks a chunk": Shape(chunk_size=3 * BLOCK_SIZE, depth=2, redis=True, num_blocks=26),
    "one block a chunk": Shape(chunk_size=BLOCK_SIZE, num_blocks=16),
    "what is reused": Shape(redis=True, admission="reused", depth=2),
    "inside steps": Shape(in_step=True),
    "inside steps, async": Shape(in_step=True, depth=2, redis=True, tier_chunks=20),
    "inside steps, two ranks": Shape(in_step=True, depth=2, world_size=2, prefix_caching=False),
    "inside steps, deep, zeroed": Shape(in_step=True, depth=3, zeroes=True, prefix_caching=False),
    "consumer": Shape(role="kv_consumer", redis=True),
    "producer": Shape(role="kv_producer"),
    # vLLM's own cache may give a head the KV of another prompt's next token.
    "a drafter's head": Shape(lookahead=1, redis=True, depth=2, prefix_caching=False),
    "audited": Shape(audit_share=1.0, num_blocks=40),
    "audited, async, redis": Shape(audit_share=0.5, depth=3, redis=True),
    "audited, two ranks": Shape(audit_share=0.5, world_size=2, depth=2),
    "audited, no prefix caching": Shape(audit_share=0.5, prefix_caching=False, redis=True),
    "audited consumer": Shape(audit_share=0.5, role="kv_consumer", redis=True),
}
PARTS = {
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
    "states": Shape(groups=("s", "full"), chunk_size=BLOCK_SIZE, num_blocks=40),
    "states, async, redis": Shape(
        groups=("s", "full", "s"), chunk_size=BLOCK_SIZE, num_blocks=60, depth=2, redis=True
    ),
    "states and windows": Shape(groups=("s", "full", "w40"), chunk_size=BLOCK_SIZE, num_blocks=60),
    "states and drafts": Shape(
        groups=("s", "full", "s"), chunk_size=BLOCK_SIZE, num_blocks=60, redis=True, drafts=3
    ),
    "states, windows and drafts, zeroed": Shape(
        groups=("w40", "s", "full"), chunk_size=BLOCK_SIZE, num_blocks=60, zeroes=True, drafts=2
    ),
    "windows, a drafter's head": Shape(
        groups=GEMMA, lookahead=1, redis=True, num_blocks=60, prefix_caching=False
    ),
    "a ring": Shape(groups=("full", "r8"), num_blocks=40),
    "a ring, windows, async, redis": Shape(
        groups=("r8", "w40", "full"), depth=2, redis=True, num_blocks=50
    ),
    "narrow windows": Shape(groups=("full", "w10"), max_batched_tokens=48, num_blocks=40),
}
SHAPES |= {name: replace(shape, tier_chunks=30) for name, shape in PARTS.items()}
# Requests have adapters, images and hand-overs, and another connector may lie.
FULL = {
    "alone": Shape(),
    "zeroed": Shape(zeroes=True, num_blocks=18),
    "zeroed, async": Shape(zeroes=True, depth=2, num_blocks=18, redis=True),
    "audited": Shape(audit_share=1.0, depth=2, redis=True),
    "first of two": Shape(beside=0, redis=True),
    "second of two": Shape(beside=1),
    "second of two, async": Shape(beside=1, depth=2, redis=True),
    "second of two, deep, zeroed": Shape(beside=1, depth=3, zeroes=True, num_blocks=20),
    "second of two, two ranks": Shape(beside=1, world_size=2),
    "without prefix caching": Shape(prefix_caching=False, zeroes=True, depth=2),
    "second of two, without prefix caching": Shape(beside=1, prefix_caching=False),
    "three blocks a chunk": Shape(beside=1, chunk_size=3 * BLOCK_SIZE, depth=2, num_blocks=26),
    "windows": Shape(groups=GEMMA, num_blocks=50, tier_chunks=30),
    "windows, async, redis": Shape(
        groups=("full", "w24", "c64"), num_blocks=50, tier_chunks=30, depth=2, redis=True
    ),
    "windows, zeroed, without prefix caching": Shape(
        groups=("w40", "full"), num_blocks=36, tier_chunks=30, zeroes=True, prefix_caching=False
    ),
    "one window": Shape(groups=("w40",)),
    "a drafter's head": Shape(lookahead=1, redis=True),
    "a drafter's head, async, zeroed": Shape(lookahead=1, depth=2, zeroes=True, num_blocks=26),
    "a drafter's head, windows": Shape(
        groups=("w40", "full"), lookahead=1, num_blocks=60, tier_chunks=30
    ),
    "a drafter's head, states": Shape(
        groups=("s", "full", "s"),
        chunk_size=BLOCK_SIZE,
        lookahead=1,
        drafts=3,
        num_blocks=60,
        tier_chunks=30,
        redis=True,
    ),
}


def live(model: Path, name: str, seed: int) -> ShadowEngine:
    faults = Faults(
        failed_load=[0.0, 0.3, 1.0][seed % 3],
        no_memory=0.1 * (seed % 2),
        slow=[0.0, 0.5, 0.9][seed // 2 % 3],
    )
    shape = replace(SHAPES[name], in_step=SHAPES[name].in_step or seed % 4 > 1)
    engine = ShadowEngine(model, shape, seed, faults)
    if engine.shape.role == "kv_consumer":
        engine.share_redis_of(filled_engine(model, seed))
    Life(engine, random.Random(seed)).live(250)
    return engine


def live_fully(model: Path, name: str, seed: int | str) -> ShadowEngine:
    """Raises :class:`WrongKV` if a chunk is stored or loaded that is not what its key names."""
    chance = random.Random(seed)
    faults = Faults(
        failed_load=chance.choice([0.0, 0.3]),
        no_memory=chance.choice([0.0, 0.1]),
        slow=chance.choice([0.0, 0.5, 0.9]),
        others_lie=True,
    )
    engine_seed, in_step = chance.randrange(1 << 32), chance.random() < 0.5
    engine = ShadowEngine(model, replace(FULL[name], in_step=in_step), engine_seed, faults)
    Life(engine, chance, is_full=True).live(60)
    return engine


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SHAPES)
def test_random_lives_never_touch_a_block_that_is_not_theirs(
    model: Path, name: str, seed: int
) -> None:
    """Nor compute on wrong KV, nor call right KV wrong."""
    engine = live(model, name, seed)
    shape, tally = engine.shape, engine.adapter.tally
    assert (tally.totals.total("store_jobs") > 0) == (shape.role != "kv_consumer")
    assert (tally.totals.total("load_jobs") > 0) == (shape.role != "kv_producer")
    loaded_in_step = tally.totals.total("loads_in_step") > 0
    assert loaded_in_step == any(r.num_loaded_in_step for r in engine.ranks)
    assert shape.in_step or not loaded_in_step
    assert loaded_in_step or not SHAPES[name].in_step
    audits = tally.totals.by_label("audits")
    assert bool(audits) == bool(shape.audit_share)
    assert audits.get("mismatch", 0) <= engine.num_resets
    for counter, labels in map(split_key, tally.totals.counters):
        assert len(METRICS[counter].labels) == len(labels)


def test_what_is_stored_is_what_its_key_names(model: Path) -> None:
    num_stored = num_loaded = 0

    @given(name=st.sampled_from(list(FULL)), seed=st.integers(0, 2**32 - 1))
    @settings(derandomize=True, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
    def lives(name: str, seed: int) -> None:
        nonlocal num_stored, num_loaded
        rank = live_fully(model, name, seed).ranks[0]
        num_stored += rank.num_stored_chunks
        num_loaded += rank.num_loaded_chunks

    lives()
    assert num_stored > 0
    assert num_loaded > 0


@pytest.mark.soak  # thousands of lives
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FULL)
def test_random_lives_with_all_that_requests_may_have_soak(model: Path, name: str) -> None:
    engines = [live_fully(model, name, f"{name} {seed}") for seed in range(500)]
    assert sum(engine.ranks[0].num_stored_chunks for engine in engines) > 0
    assert sum(engine.ranks[0].num_loaded_chunks for engine in engines) > 0
    loaded_in_step = sum(engine.ranks[0].num_loaded_in_step for engine in engines)
    assert (loaded_in_step > 0) == ("s" not in FULL[name].groups)
    assert sum(engine.adapter.tally.totals.total("dropped_stores") for engine in engines) > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHAPES)
def test_random_lives_soak(model: Path, name: str) -> None:
    engines = [live(model, name, seed) for seed in range(4, 64)]
    wanted = ["store_jobs"] if SHAPES[name].role != "kv_consumer" else []
    wanted += ["load_jobs", "recomputed_tokens"] if SHAPES[name].role != "kv_producer" else []
    for count in wanted:
        assert sum(engine.adapter.tally.totals.total(count) for engine in engines) > 0, count
    removed = sum(engine.ranks[0].num_loaded_removed for engine in engines)
    assert removed > 0 or not SHAPES[name].in_step
