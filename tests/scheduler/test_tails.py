"""Prompts that are handed over are stored and loaded up to their last token but one.

Under vLLM's real scheduler; every byte is compared by :mod:`tests.support.doubles.shadow_worker`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.plans import PartRun
from tests.support.doubles.lives import CHUNK, CONSUMED, PRODUCED, calm, prompt, serve
from tests.support.doubles.shadow_engine import ShadowEngine, Shape, next_token
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.doubles.shadow_worker import Faults
from tests.support.engine_core import STOP_TOKEN

SHAPES = {
    "alone": Shape(),
    "async": Shape(depth=2),
    "redis": Shape(redis=True, admission="reused"),
    "two ranks": Shape(world_size=2),
    "zeroed": Shape(zeroes=True),
    "windows": Shape(groups=("w40", "full", "w40"), depth=2),
    "narrow windows": Shape(groups=("full", "w10")),
    "chunked": Shape(groups=("c64", "full")),
    "a drafter's head": Shape(lookahead=1),
    "a drafter's head, windows": Shape(groups=("w40", "full"), lookahead=1, depth=2),
    "without prefix caching": Shape(prefix_caching=False),
}
LENGTHS = (2, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK + 21)


def wide(model: Path, shape: Shape) -> ShadowEngine:
    return calm(model, replace(shape, num_blocks=200, tier_chunks=400))


def handed(engine: ShadowEngine, tokens: list[int], params: Any, max_tokens: int = 2) -> int:
    """Tokens that were loaded for it. vLLM forgets it at once."""
    num_loaded = serve(engine, tokens, max_tokens, transfer=params)
    engine.forget_prefixes()
    return num_loaded


def long_answered(length: int) -> list[int]:
    """A prompt whose answer fills more than a chunk."""
    for seed in range(100):
        tokens = prompt(seed, length)
        for _ in range(CHUNK + 3):
            tokens.append(next_token(tokens))
        if STOP_TOKEN not in tokens[length:]:
            return tokens[:length]
    raise AssertionError("the shadow model says little")


def tails(engine: ShadowEngine, since: int = 0) -> list[PartRun]:
    """Of all stores planned since the plan with that number."""
    jobs = [job for plan in engine.plans[since:] for job in plan.stores]
    return [run for job in jobs for run in job.runs if run.tail_tokens]


def test_where_vllm_goes_on_in_a_ring_whole_blocks_are_handed_over(model: Path) -> None:
    """It has the tokens behind the last whole block in the ring, which nobody else has."""
    engine = wide(model, Shape(groups=("full", "r8")))
    for length in (CHUNK + 1, 2 * CHUNK + 21):
        handed(engine, prompt(length, length), PRODUCED)
        assert handed(engine, prompt(length, length), CONSUMED) == length // CHUNK * CHUNK
    assert not tails(engine)


@pytest.mark.parametrize("name", SHAPES)
def test_all_but_the_last_token_is_loaded(model: Path, name: str) -> None:
    engine = wide(model, SHAPES[name])
    for seed, length in enumerate(LENGTHS):
        tokens = prompt(seed, length)
        assert handed(engine, tokens, PRODUCED) == 0
        if engine.shape.redis:
            for rank in engine.ranks:
                rank.evict(len(rank.tier))
            handed(engine, [1, 2], None)  # tells the scheduler's side
        assert handed(engine, tokens, CONSUMED) == length - 1, length
    engine.check_whole()


def test_an_ordinary_request_neither_stores_nor_loads_a_tail(model: Path) -> None:
    engine = wide(model, Shape())
    tokens = prompt(1, CHUNK + 9)
    handed(engine, tokens, None)
    assert tails(engine) == []
    handed(engine, tokens, PRODUCED)
    assert tails(engine) != []
    for params in (None, PRODUCED, {"do_remote_prefill": "yes"}, {"do_remote_prefill": False}):
        assert handed(engine, tokens, params) == CHUNK
    assert handed(engine, tokens, CONSUMED) == CHUNK + 8


def test_a_head_that_looks_ahead_names_the_last_token(model: Path) -> None:
    engine = wide(model, Shape(lookahead=1))
    tokens = prompt(1, CHUNK + 9)
    handed(engine, tokens, PRODUCED)
    assert handed(engine, [*tokens[:-1], tokens[-1] + 1], CONSUMED) == CHUNK


@pytest.mark.parametrize("name", ["alone", "windows", "a drafter's head", "zeroed"])
@pytest.mark.parametrize("length", [2, CHUNK - 3, CHUNK + 9])
def test_what_follows_a_tail_is_stored_from_the_last_full_chunk_on(
    model: Path, name: str, length: int
) -> None:
    engine = wide(model, SHAPES[name])
    tokens, since = long_answered(length), len(engine.plans)
    handed(engine, tokens, PRODUCED)
    request_id = engine.add(tokens, max_tokens=3 * CHUNK, transfer=CONSUMED)
    engine.run_until_idle()
    answered = list(engine.requests[request_id].all_token_ids)
    engine.forget_prefixes()
    stored = len(answered) - 1 - engine.shape.lookahead
    assert stored > length + CHUNK
    assert handed(engine, [*answered, 3], None) == stored // CHUNK * CHUNK
    assert len({run.keys for run in tails(engine, since)}) == len(engine.parts)


def test_a_prompt_in_vllms_cache_is_stored_for_another(model: Path) -> None:
    """What vLLM has cached itself counts if this connector saw it come about."""
    engine = wide(model, Shape())
    tokens = prompt(1, 2 * CHUNK + 9)
    for params in (None, PRODUCED):
        engine.add(tokens, max_tokens=2, transfer=params)
        engine.run_until_idle()
    engine.forget_prefixes()
    assert handed(engine, tokens, CONSUMED) == 2 * CHUNK + 8


def test_a_tail_is_stored_in_the_step_that_ends_its_prompt(model: Path) -> None:
    """Though that step fills no block."""
    engine = wide(model, Shape())
    engine.add(prompt(1, engine.shape.max_batched_tokens + 4), max_tokens=9, transfer=PRODUCED)
    engine.step()
    assert tails(engine) == []
    engine.step()
    (tail,) = tails(engine)
    assert tail.tail_tokens == 3


def test_a_tail_is_not_stored_from_a_block_that_another_request_has_by_then(model: Path) -> None:
    """A preemption gives it away before the copy is made."""
    faults = Faults(stuck=True)
    engine = ShadowEngine(model, Shape(num_blocks=6, max_batched_tokens=128), 0, faults)
    engine.add(long_answered(2 * BLOCK_SIZE), max_tokens=5)
    engine.add(prompt(1, CHUNK + 9), max_tokens=2, transfer=PRODUCED)
    engine.step()
    assert tails(engine) != []
    engine.step()
    assert engine.num_preemptions == 1
    faults.stuck = False
    engine.run_until_idle()
    engine.check_whole()


def test_the_block_that_a_tail_ends_in_is_as_any_other_once_it_is_full(model: Path) -> None:
    """It is in vLLM's cache when the tier has let go of it, and the conversation goes on."""
    engine = wide(model, Shape())
    tokens = long_answered(CHUNK + 9)
    handed(engine, tokens, PRODUCED)
    request_id = engine.add(tokens, max_tokens=CHUNK, transfer=CONSUMED)
    engine.run_until_idle()
    engine.ranks[0].evict(400)
    engine.step()
    before = engine.ranks[0].num_stored_chunks
    again = engine.add([*engine.requests[request_id].all_token_ids, 3], max_tokens=1)
    engine.step()
    assert engine.requests[again].num_computed_tokens > 2 * CHUNK
    engine.run_until_idle()
    engine.check_whole()
    assert engine.ranks[0].num_stored_chunks == before + 2
