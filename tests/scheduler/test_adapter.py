"""The scheduler side under vLLM's real scheduler: jobs, resets, and what is told to others.

Every block access of every job is checked by :mod:`tests.support.doubles.shadow_worker`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_connector.plans import PeerSource, Tier, WeightsInMemory
from tests.support.clock import Clock
from tests.support.doubles.lives import CHUNK, calm, prompt
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_parts import SteppedAnswer
from tests.support.doubles.shadow_worker import Faults


def test_a_load_planned_with_the_store_it_relies_on_runs_after_it(model: Path) -> None:
    """A request that ends stores the rest of its answer; the next one wants that chunk at once."""
    engine = ShadowEngine(model, Shape(prefix_caching=False), 0, Faults(slow=1.0))
    first = engine.requests[engine.add(prompt(3, CHUNK - 4), max_tokens=8)]
    other = engine.add(prompt(2, 6 * CHUNK), max_tokens=CHUNK)
    while not first.is_finished():
        engine.step()
    assert first.num_tokens > CHUNK
    engine.abort(other)  # its blocks are handed out first
    second = engine.add([*first.all_token_ids, 1], max_tokens=1)
    engine.run_until_idle()
    (together,) = [plan for plan in engine.plans if plan.loads and plan.stores]
    assert together.loads[0].after_job == together.stores[0].job_id
    assert together.later_stores() == []
    assert engine.ranks[0].num_loaded_chunks == 1
    engine.check_answer(second)
    engine.check_whole()


def stored_keys(engine: ShadowEngine) -> tuple[bytes, ...]:
    """Serve a prompt; returns the chunk keys under which it was stored last."""
    engine.add(prompt(1, 2 * CHUNK), max_tokens=1)
    engine.run_until_idle()
    return [job.keys for plan in engine.plans for job in plan.stores][-1]


def test_of_the_roots_that_metrics_show_the_latest_is_in_use(model: Path) -> None:
    engine, shown = calm(model, Shape()), dict[str, float]()
    stored_keys(engine)

    def note(name: str, *labels: str, value: float) -> None:
        if name == "info":
            shown[labels[0]] = value

    vars(engine.adapter.tally)["set"] = note
    assert engine.reset()
    stored_keys(engine)
    assert list(shown.values()) == [0.0, 1.0]


def test_ranks_whose_answer_vllm_has_lost_are_asked_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user of an engine in one process, with ranks in others, has interrupted it between a
    step and the update from it."""
    engine, clock = calm(model, Shape()), Clock()
    weights = engine.adapter.book.weights
    vars(weights)["_clock"] = clock
    assert engine.scheduler.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(engine.adapter, "update_from_reports", lambda reports: [])
        engine.step()
    engine.add(prompt(1, 2 * CHUNK), max_tokens=1)
    clock.now += 9.0
    for _ in range(4):
        engine.step()
    assert not weights.name
    clock.now += 1.0
    engine.add(prompt(2, 2 * CHUNK), max_tokens=1)
    engine.run_until_idle()
    assert weights.name
    engine.add(prompt(3, 2 * CHUNK), max_tokens=1)
    engine.run_until_idle()
    assert any(plan.stores for plan in engine.plans)
    engine.check_whole()


def test_what_ends_with_the_first_step_after_an_update_is_not_stored(model: Path) -> None:
    """vLLM tells of the end of a request before it hands over what ranks report of that step."""
    for is_updated in (False, True):
        engine = calm(model, Shape())
        engine.add(prompt(1, CHUNK - 1), max_tokens=2)
        engine.step()
        if is_updated:
            told = iter([WeightsInMemory(version=2, digest="others")])
            vars(engine.ranks[0])["_read_weights"] = lambda _, told=told: next(told, None)
        engine.step()
        assert not engine.live
        num_plans = len(engine.plans)
        engine.run_until_idle()
        assert any(plan.stores for plan in engine.plans[num_plans:]) != is_updated
        engine.check_whole()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_only_what_a_second_request_wants_goes_to_redis(model: Path, prefix_caching: bool) -> None:
    shape = Shape(redis=True, admission="reused", prefix_caching=prefix_caching, num_blocks=40)
    engine = calm(model, shape)
    (rank,) = engine.ranks
    shared = prompt(1, 2 * CHUNK)
    num_written = []
    for own in (2, 3, 4):
        engine.add(shared + prompt(own, CHUNK + 1), max_tokens=1)
        engine.run_until_idle()
        num_written.append(len(rank.remote))
    assert num_written == [0, 2, 2]
    assert len(rank.tier) == 5
    engine.check_whole()


def test_requests_on_one_prefix_do_not_wait_for_each_other(model: Path) -> None:
    """Eight at once, nothing cached: no more steps than for a producer, which loads nothing."""
    steps = {}
    for role in ("kv_both", "kv_producer"):  # a producer never loads
        engine = calm(model, Shape(num_blocks=80, role=role))
        for i in range(8):
            engine.add(prompt(1, 3 * CHUNK) + prompt(10 + i, 8), max_tokens=4)
        engine.run_until_idle()
        engine.check_whole()
        steps[role] = sum(not plan.idle for plan in engine.plans)
    assert steps["kv_both"] <= steps["kv_producer"]


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("is_slow", [False, True])
def test_redis_takes_the_place_of_a_named_instance_where_its_load_pays(
    model: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool, num_steps: int
) -> None:
    """Where it does not pay, the half that the instance has is loaded. Redis answers ``num_steps``
    steps after the instance."""
    engine = calm(model, Shape(redis=True, num_blocks=100))
    adapter, costs = engine.adapter, engine.adapter.policy.model
    costs.mode = "auto"
    for context in (0, 4096):
        costs.observe_prefill(4096, context, 4.096)
    costs.tiers[Tier.REDIS].arrived(0.0, 1 << 20, 1000.0 if is_slow else 1e-3)
    lookup = adapter.hits.lookup
    monkeypatch.setattr(lookup, "submit", lambda keys: SteppedAnswer(frozenset(keys), num_steps))
    request = engine.requests[engine.add(prompt(1, 8 * CHUNK + 1), max_tokens=1)]
    state = adapter.book.get(request.request_id)
    assert state is not None
    state.source = PeerSource("127.0.0.1", 1, 1, is_trusted=True)
    state.lookup.offered_keys = frozenset(state.keys.keys[:4])
    for _ in range(num_steps):
        assert adapter.get_num_new_matched_tokens(request, 0) == (None, False)
    num_chunks = 4 if is_slow else 8
    assert adapter.get_num_new_matched_tokens(request, 0) == (num_chunks * CHUNK, True)
    assert (state.source is None) is not is_slow


def test_an_aborted_load_counts_no_tokens(model: Path) -> None:
    """They are neither recomputed nor saved: else disconnecting clients look like lost hits."""
    engine = ShadowEngine(model, Shape(prefix_caching=False), 0, Faults(slow=1.0))
    engine.add(prompt(3, 6 * CHUNK), max_tokens=1)
    engine.run_until_idle()
    engine.add(prompt(2, CHUNK), max_tokens=2 * CHUNK)  # so that no step waits for the load
    engine.step()
    second = engine.add([*prompt(3, 6 * CHUNK), 1], max_tokens=1)
    num_plans = len(engine.plans)
    while not any(plan.loads for plan in engine.plans[num_plans:]):
        engine.step()
    engine.abort(second)
    engine.run_until_idle()
    assert engine.ranks[0].num_loaded_chunks == 0, "the load was cut off"
    for name in ("recomputed_tokens", "prefill_saved_tokens"):
        assert engine.adapter.tally.totals.total(name) == 0
