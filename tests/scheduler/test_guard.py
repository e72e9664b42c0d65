"""Whatever the scheduler side raises, in whichever call: the engine goes on, and no KV is wrong.

vLLM's real scheduler makes the calls. One raises somewhere inside our scheduler side, at the
beginning of a function that a seed picks: what was done by then is left half done.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import RequestStatus

from lmcache_connector.net.address import Address
from lmcache_connector.peers.routing import Router
from tests.support.doubles.foreign_connector import Arrival, Offer
from tests.support.doubles.lives import PRODUCED, Life, prompt
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.doubles.shadow_worker import Faults
from tests.support.planted import PlantedError, Planter

# All that vLLM calls of a scheduler side once it has started, as of KVConnectorBase_V1.
CALLS = (
    "build_connector_meta",
    "get_external_cache_hit_sources",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "has_pending_block_frees",
    "has_pending_push_work",
    "on_new_request",
    "request_finished_all_groups",
    "reset_cache",
    "take_events",
    "update_connector_output",
    "update_state_after_alloc",
)
SHALLOW = {"has_pending_block_frees", "has_pending_push_work"}
MADE = [call for call in CALLS if hasattr(KVConnectorBase_V1, call)]  # by this vLLM
# Other methods of the base: vLLM has its own, or calls them at start, at the end or in workers.
NOT_OURS = {
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "get_finished_count",
    "get_loaded_kv_cache_group_ids",
    "get_required_kvcache_layout",
    "register_finished_partial_tail",
    "request_finished",
    "requires_kv_delivery",
    "requires_piecewise_for_cudagraph",
    "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "supports_divergent_local_hybrid_hits",
}
INSIDE = "inside steps"
SHAPES = {
    "plain": Shape(num_blocks=30),
    "async, redis": Shape(depth=2, redis=True, num_blocks=30, audit_share=0.3),
    "two ranks": Shape(world_size=2, num_blocks=30),
    "windows": Shape(groups=("w40", "full"), num_blocks=50, tier_chunks=30, zeroes=True),
    INSIDE: Shape(in_step=True, depth=2, num_blocks=30),
    "first of two": Shape(beside=0, num_blocks=30),
    "second of two, deep": Shape(beside=1, depth=3, num_blocks=30, kv_events=True),
}


def test_all_calls_of_vLLM_are_known() -> None:
    scheduler_side = Path(sys.modules[KVConnectorBase_V1.__module__].__file__ or "").read_text()
    after = scheduler_side.partition("# Scheduler-side methods")[2]
    assert after
    named = {
        name
        for name in vars(KVConnectorBase_V1)
        if f"def {name}(" in after and not name.startswith("_")
    }
    assert named <= {*CALLS, *NOT_OURS}
    assert {"request_finished_all_groups", "get_kv_connector_stats"} <= {*CALLS}


def a_life(model: Path, call: str, shape: Shape, chance: random.Random, at: int) -> bool:
    """Whether the call was made often enough to raise."""
    faults = Faults(failed_load=0.2, no_memory=0.1, slow=0.5, others_lie=shape.beside is not None)
    engine = ShadowEngine(model, shape, chance.randrange(1 << 32), faults)
    depth = 1 if call in SHALLOW else chance.choice([1, 1, 2, 3, 5, 8, 13])
    planter = Planter(engine.connector, call, at, depth)
    life = Life(engine, chance)
    life.live(100)
    loads = engine.adapter.tally.totals.total("load_jobs")
    faults.failed_load = faults.no_memory = 0.0
    for _ in range(5):  # it may be during these that it raises
        engine.add([*prompt(99, 100), 1], 1)
        life.rest()
        assert engine.scheduler.reset_prefix_cache()
    assert engine.adapter.tally.totals.total("load_jobs") > loads, "the cache is not used any more"
    return planter.has_raised


def shapes_for(call: str) -> list[str]:
    """A load inside a step that cannot be planned ends the engine: see `test_in_step`."""
    return [name for name in SHAPES if (call, name) != ("update_state_after_alloc", INSIDE)]


@pytest.mark.parametrize("call", MADE)
def test_a_call_that_raises_costs_hits_alone(model: Path, call: str) -> None:
    """Blocks are let go of, no request hangs, and no KV is wrong. Each call in three of the shapes,
    or in more until it has raised once: the soak has all."""
    shapes, num_raised = shapes_for(call), 0
    for i in range(20):
        shape = shapes[(CALLS.index(call) + 2 * i) % len(shapes)]
        chance = random.Random(f"{call} {shape} {i}")
        num_raised += a_life(model, call, SHAPES[shape], chance, 0 if i else 30)
        if i >= 2 and num_raised:
            return
    raise AssertionError("it was never called")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("call", "shape"), [(call, shape) for call in MADE for shape in shapes_for(call)]
)
def test_a_call_that_raises_costs_hits_alone_soak(model: Path, call: str, shape: str) -> None:
    num_raised = 0
    at = [0] if call == "has_pending_block_frees" else [0, 3, 10, 60]  # most lives do not call it
    for number in range(60):
        chance = random.Random(f"{call} {shape} {number}")
        num_raised += a_life(model, call, SHAPES[shape], chance, chance.choice(at))
    assert num_raised > 0


@pytest.mark.parametrize("call", MADE)
def test_a_side_that_always_raises_and_cannot_start_over_is_left_alone(
    model: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ShadowEngine(model, SHAPES["async, redis"], 0, Faults(slow=0.5))
    life = Life(engine, random.Random(1))
    life.live(60)
    planter, num_raised = Planter(engine.connector, call, 0, 1), 0

    def raising() -> None:
        nonlocal num_raised
        num_raised += 1
        planter.has_raised = False  # it raises the next time as well
        raise PlantedError

    with monkeypatch.context() as patch:
        patch.setattr(engine.adapter, "start_over", raising)
        num_steps = 0
        while num_steps < 60 or (num_raised == 0 and num_steps < 1000):  # some calls are rare
            life.add()
            engine.step()
            num_steps += 1
        engine.run_until_idle()
        engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert num_raised > 0
    engine.add([1], 1)
    life.rest()


def test_a_request_may_have_the_id_of_one_whose_stores_are_open(model: Path) -> None:
    """Some routers need equal ids. The second one's content is hidden, so it bypasses the tiers."""
    faults = Faults(slow=1.0)
    engine = ShadowEngine(model, Shape(num_blocks=60), 0, faults)
    engine.add(prompt(1, 300), 1, request_id="same")
    engine.step()
    engine.step()
    assert engine.adapter.jobs.has_unattended
    engine.abort("same")
    engine.add(prompt(2, 300), 5, request_id="same", bypasses=True)
    for _ in range(8):
        engine.step()
    assert engine.adapter.tally.totals.total("scheduler_failures") == 0
    faults.slow = 0.0
    engine.run_until_idle()
    engine.check_answer("same")
    engine.check_whole()


def test_workers_are_told_once_to_start_over(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ShadowEngine(model, Shape(num_blocks=60), 0, Faults(slow=1.0))
    engine.add(prompt(1, 300), 5)
    engine.step()
    engine.step()
    assert engine.adapter.jobs.has_unattended

    def raising(*_: Any) -> None:
        raise PlantedError

    with monkeypatch.context() as patch:
        patch.setattr(engine.adapter, "build_plan", raising)
        engine.step()
    num_before = len(engine.plans) - 1
    for _ in range(3):
        engine.step()
    assert sum(plan.starts_over for plan in engine.plans[num_before:]) == 1


def wait_for(engine: ShadowEngine, is_so: Callable[[], bool]) -> None:
    for _ in range(50):
        if is_so():
            return
        engine.step()
    raise AssertionError("it does not come to that")


@pytest.mark.parametrize("call", ["build_connector_meta", "take_events"])
def test_no_block_stays_pinned_after_a_call_that_raises(model: Path, call: str) -> None:
    """Nobody ends the stores that are forgotten."""
    faults = Faults(stuck=True)
    engine = ShadowEngine(model, Shape(num_blocks=60, prefix_caching=False), 0, faults)
    for number in range(2):
        engine.add(prompt(number, 100), 2)
    engine.add(prompt(2, 100), 40)
    wait_for(engine, lambda: len(engine.live) == 1)
    assert engine.adapter.held._pins
    planter = Planter(engine.connector, call, 0, 1)
    engine.step()
    assert planter.has_raised
    faults.stuck = False
    engine.run_until_idle()
    engine.check_whole()


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_load_that_was_promised_when_a_call_raised_is_computed(
    model: Path, monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    """Whether the workers have heard of it by then or not."""
    faults = Faults(slow=0.0)
    engine = ShadowEngine(model, Shape(num_blocks=60), 0, faults)
    tokens = [*prompt(1, 300), 1]
    engine.add(tokens, 1)
    engine.run_until_idle()
    engine.forget_prefixes()
    faults.stuck = True
    name = engine.add(tokens, 1)
    if is_sent:
        wait_for(engine, lambda: engine.is_loading(name))
        assert engine.connector._guard is not None
        engine.connector._guard.failed("take_events", PlantedError("mine"))
    else:
        with monkeypatch.context() as patch:
            patch.setattr(engine.adapter, "build_plan", lambda _: 1 / 0)
            wait_for(engine, lambda: engine.is_loading(name))
    assert engine.adapter.tally.totals.total("scheduler_failures") > 0
    faults.stuck = False
    engine.run_until_idle()
    engine.check_answer(name)


@pytest.mark.parametrize("of", ["known", "failed", "forgotten", "another connector's"])
def test_the_blocks_of_a_load_whose_client_goes_away_are_given_back_once(
    model: Path, of: str
) -> None:
    """vLLM keeps them until the load has ended; a second end would end its engine. A reset, which
    vLLM refuses while it waits for a load, has dropped what the scheduler side knew of it."""
    faults, is_foreign = Faults(slow=0.0), of == "another connector's"
    shape = Shape(num_blocks=60, beside=1 if is_foreign else None)
    engine = ShadowEngine(model, shape, 0, faults)
    engine.adapter.transfers.router = Router(Address("127.0.0.1", 1), True, False, ())
    tokens = [*prompt(1, 300), 1]
    engine.add(tokens, 1)
    engine.run_until_idle()
    engine.forget_prefixes()
    faults.stuck = True
    offer = Offer(4 * BLOCK_SIZE, True, Arrival.RIGHT) if is_foreign else None
    name = engine.add(tokens, 1, transfer=PRODUCED, offer=offer)
    wait_for(engine, lambda: engine.is_loading(name))
    if of == "forgotten":
        assert not engine.reset()
    if of == "failed":  # for a reason of vLLM's own
        engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ERROR)
    else:
        engine.abort(name)
    faults.stuck = False
    engine.run_until_idle()
    ended = [
        told for plan in engine.plans for told in plan.transfers if told.ends_after is not None
    ]
    assert [told.held_request for told in ended] == [""]
    engine.check_whole()


def test_failures_are_logged_once_per_episode_and_counted(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ShadowEngine(model, Shape(), 0)
    guard, now = engine.connector._guard, [100.0]
    assert guard is not None
    monkeypatch.setattr(guard._failures, "_clock", lambda: now[0])
    for seconds in (0.0, 1.0, 50.0, 61.0):
        now[0] += seconds
        guard.failed("take_events", PlantedError("mine"))
    assert caplog.text.count("take_events failed") == 2
    assert engine.adapter.tally.totals.total("scheduler_failures") == 4
