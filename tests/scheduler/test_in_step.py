"""Loads inside the step that uses them, under vLLM's real scheduler."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from lmcache_connector.change_count import ChangeCount, ReadCount
from tests.support.doubles.lives import calm, prompt
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.planted import PlantedError

CHUNK = 2 * BLOCK_SIZE
SHAPES = {
    "plain": Shape(in_step=True, num_blocks=60),
    "async": Shape(in_step=True, num_blocks=60, depth=2),
    "two ranks": Shape(in_step=True, num_blocks=60, depth=2, world_size=2),
    "windows": Shape(in_step=True, num_blocks=60, groups=("w40", "full"), zeroes=True),
}


def engine_with(model: Path, shape: Shape, tokens: list[int]) -> ShadowEngine:
    """Memory holds the prompt, and vLLM does not."""
    engine = calm(model, shape)
    engine.add(tokens, 2)
    engine.run_until_idle()
    engine.forget_prefixes()
    engine.plans.clear()
    return engine


def num_in_step(engine: ShadowEngine) -> int:
    return sum(len(plan.loads_in_step()) for plan in engine.plans)


def num_loads(engine: ShadowEngine) -> int:
    return sum(len(plan.loads) for plan in engine.plans)


@pytest.mark.parametrize("length", [CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 9])
@pytest.mark.parametrize("name", SHAPES)
def test_the_first_plan_of_a_request_loads_its_hit(model: Path, name: str, length: int) -> None:
    """Even if the whole prompt is a hit; but with windows, such a hit ends a chunk earlier."""
    engine = engine_with(model, SHAPES[name], prompt(1, length))
    request_id = engine.add(prompt(1, length), 3)
    engine.step()
    if name == "windows" and length == CHUNK:
        assert num_loads(engine) == 0
    else:
        assert num_in_step(engine) == num_loads(engine) == 1
    assert not engine.is_loading(request_id)
    engine.run_until_idle()
    engine.check_answer(request_id)
    engine.check_whole()


@pytest.mark.parametrize("length", [CHUNK + 1, 2 * CHUNK + 60])
def test_a_step_that_loads_is_no_measure_of_decode_steps(
    model: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Nor of prefill, as the copy is part of its time. What it leaves to compute counts."""
    engine = engine_with(model, SHAPES["plain"], prompt(1, 2 * CHUNK))
    steps, policy = [], engine.adapter.policy
    planned = policy.step_planned

    def noted(num_requests: int, prompt_tokens: int, *, has_prefill: bool) -> None:
        steps.append((prompt_tokens, has_prefill))
        planned(num_requests, prompt_tokens, has_prefill=has_prefill)

    monkeypatch.setattr(policy, "step_planned", noted)
    engine.add(prompt(1, 2 * CHUNK)[:CHUNK] + prompt(2, length - CHUNK), 3)
    engine.step()
    assert num_in_step(engine) == 1
    assert engine.plans[-1].prefill is None
    assert steps == [(max(0, length - CHUNK - 64), True)]
    engine.run_until_idle()
    assert not steps[-1][1]


def test_states_are_loaded_beside_the_steps(model: Path) -> None:
    """vLLM's model runner copies a state on before it starts any load."""
    shape = Shape(in_step=True, num_blocks=60, chunk_size=BLOCK_SIZE, groups=("s", "full"))
    tokens = prompt(1, 3 * BLOCK_SIZE + 5)
    engine = engine_with(model, shape, tokens)
    request_id = engine.add(tokens, 1)
    engine.run_until_idle()
    assert num_loads(engine) == 1
    assert num_in_step(engine) == 0
    engine.check_answer(request_id)


def test_what_may_have_changed_unseen_is_loaded_beside_the_steps(model: Path) -> None:
    """As by a call that changes the weights; after its report, loads are inside steps again."""
    engine = engine_with(model, SHAPES["two ranks"], prompt(1, 3 * CHUNK))
    count = engine.ranks[1].changes
    assert count is not None
    count.add()
    engine.add(prompt(1, 3 * CHUNK), 1)
    engine.step()
    assert num_loads(engine) == 1
    assert num_in_step(engine) == 0
    engine.run_until_idle()
    engine.forget_prefixes()
    engine.plans.clear()
    engine.add(prompt(1, 3 * CHUNK), 1)
    engine.run_until_idle()
    assert num_in_step(engine) == 1


@pytest.mark.parametrize("call", ["build_plan", "load_planned"])
def test_a_load_that_vllm_counts_on_is_made_though_the_side_raises(
    model: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    engine = engine_with(model, SHAPES["plain"], prompt(1, 3 * CHUNK))

    def raising(*_: object) -> None:
        raise PlantedError

    request_id = engine.add(prompt(1, 3 * CHUNK), 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.adapter, call, raising)
        engine.step()
    assert engine.adapter.tally.totals.total("scheduler_failures") == 1
    assert num_in_step(engine) == 1
    engine.run_until_idle()
    engine.check_answer(request_id)
    engine.check_whole()


def test_a_load_that_vllm_counts_on_and_that_cannot_be_planned_ends_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(model, SHAPES["plain"], prompt(1, 3 * CHUNK))
    engine.add(prompt(1, 3 * CHUNK), 1)
    monkeypatch.setattr(engine.adapter, "update_state_after_alloc", lambda *_: None)
    with pytest.raises(RuntimeError, match="was not planned"):
        engine.step()


def test_a_count_is_read_where_it_lies_and_nowhere_else() -> None:
    count = ChangeCount()
    read = ReadCount(count.place)
    assert read.is_there
    before = read.number
    count.add()
    assert read.number == count.number == before + 1
    assert ChangeCount().number != count.number
    place = count.place
    count.close()
    assert not ReadCount(place).is_there
    assert not ReadCount("").is_there
    with Path(__file__).open("rb") as other:  # what lies there on the scheduler's host
        assert not ReadCount(f"/proc/self/fd/{other.fileno()}").is_there


def test_without_memory_to_share_an_engine_starts_all_the_same() -> None:
    """As on a host whose kernel refuses such memory: a process out of descriptors gets none."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as free:
        lowest = free.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        count = ChangeCount()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    count.add()
    assert count.number == 1
    assert not ReadCount(count.place).is_there
    count.close()
