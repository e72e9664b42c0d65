"""No request starves: how often vLLM may be told to ask again, on vLLM's real scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

from lmcache_connector.plans import LoadedAdapterList, RankReport
from lmcache_connector.requests.adapters import AdapterDigests
from lmcache_connector.scheduler.scheduler import Scheduler
from lmcache_connector.threads import PENDING
from tests.support.clock import Clock
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_worker import Faults
from tests.support.engine_core import STOP_TOKEN

CHUNK = Shape().chunk_size
STEP_TOKENS = Shape().max_batched_tokens


def engine_of(model: Path) -> tuple[ShadowEngine, Clock]:
    engine = ShadowEngine(model, Shape(num_blocks=200), 0, Faults(slow=0.0), reads_requests=True)
    clock = Clock()
    engine.adapter.clock = engine.adapter.book.adapters._clock = clock
    return engine, clock


def prompt(num_tokens: int) -> list[int]:
    return [STOP_TOKEN + 1 + i % 3 for i in range(num_tokens)]


def first_steps(
    model: Path, seconds: float, lora: LoRARequest | None, length: int
) -> tuple[int, int]:
    """The first step of a request that queues behind others, and that of one that comes after it.
    Other prompts fill every step, of ``seconds`` each."""
    engine, clock = engine_of(model)
    for number in range(6):
        engine.add([number, *prompt(length * STEP_TOKENS)], 1)
    engine.step()
    names = [engine.add(prompt(2 * CHUNK), 1, lora_request=lora)]
    names += [engine.add([number, *prompt(length * STEP_TOKENS)], 1) for number in range(6, 12)]
    started: dict[str, int] = {}
    for step in range(200):
        clock.now += seconds
        for look in engine.adapter.book.adapters.looks.values():
            assert look.reading.wait(10.0), "files are read while a step runs"
        if engine.plans[-1].adapter_question:
            listed = LoadedAdapterList(engine.plans[-1].adapter_question)
            engine.adapter.update_from_reports([RankReport(0, (), (), adapters=listed)])
        engine.step()
        for name in names:
            if engine.requests[name].num_computed_tokens:
                started.setdefault(name, step)
        if len(started) == len(names):
            break
    engine.run_until_idle()
    engine.check_whole()
    assert started[names[0]] > 3, "others came first"
    return started[names[0]], started[names[1]]


@pytest.mark.parametrize("seconds", [0.2, 1.1, 4.4])
@pytest.mark.parametrize("length", [1, 4])
def test_a_request_with_an_adapter_runs_in_its_turn_under_any_load(
    model: Path, tmp_path: Path, seconds: float, length: int
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    plain = first_steps(model, seconds, None, length)
    assert first_steps(model, seconds, LoRARequest("a", 1, str(tmp_path)), length) == plain


def unread(engine: ShadowEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.adapter.book, "enter", lambda *_: PENDING)


def unread_again(engine: ShadowEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.adapter.book.identifier, "is_current", lambda *_: PENDING)


def unanswered(engine: ShadowEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.adapter.hits, "find", lambda *_: PENDING)


@pytest.mark.parametrize("seconds", [0.01, 3.0])
@pytest.mark.parametrize("cause", [unread, unread_again, unanswered])
def test_whatever_never_comes_a_request_is_computed(
    model: Path, monkeypatch: pytest.MonkeyPatch, cause: Callable[..., Any], seconds: float
) -> None:
    engine, clock = engine_of(model)
    cause(engine, monkeypatch)
    name, asked_at = engine.add(prompt(2 * CHUNK), 1), clock.now
    while not engine.requests[name].is_finished():
        engine.step()
        clock.now += seconds
        assert clock.now <= asked_at + 10.0 + 3 * seconds
    engine.check_answer(name)
    assert clock.now > asked_at + 9.0, "it was waited for"
    engine.check_whole()


def loads_that_come_to_nothing(model: Path, policy: SchedulingPolicy) -> ShadowEngine:
    """The loads of four requests were under way when vLLM was told to forget its KV, and fail. vLLM
    goes on keeping blocks free for these requests: nearly all there are."""
    faults = Faults(slow=0.0)
    engine = ShadowEngine(model, Shape(num_blocks=30, tier_chunks=100), 0, faults)
    scheduler = engine.scheduler
    scheduler.policy = policy
    scheduler.waiting, scheduler.skipped_waiting = map(create_request_queue, [policy] * 2)
    for number in range(5):
        engine.add([number, *prompt(100)], 1)
        engine.run_until_idle()
    engine.forget_prefixes()
    faults.stuck = True
    for number in range(4):
        engine.add([number, *prompt(100)], 1, priority=1)
    engine.step()
    assert len(engine.adapter.jobs) == 4
    assert not scheduler.reset_prefix_cache()
    faults.stuck, faults.failed_load = False, 1.0
    while len(engine.adapter.jobs):
        engine.step()
    faults.failed_load = 0.0
    return engine


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_loads_that_come_to_nothing_stop_nobody(model: Path, policy: SchedulingPolicy) -> None:
    engine = loads_that_come_to_nothing(model, policy)
    engine.run_until_idle()
    engine.check_whole()


def test_loads_that_come_to_nothing_stop_no_urgent_request(model: Path) -> None:
    """It has a hit, but vLLM refuses its load as long as those blocks are reserved."""
    engine = loads_that_come_to_nothing(model, SchedulingPolicy.PRIORITY)
    urgent = engine.add([4, *prompt(100)], 1, priority=0)
    engine.run_until_idle()
    engine.check_whole()
    engine.check_answer(urgent)


# -- images and adapters ---------------------------------------------------------------------------


@pytest.fixture
def engine(model: Path) -> ShadowEngine:
    return ShadowEngine(model, Shape(), 0, Faults(slow=0.0), reads_requests=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


def tell(adapter: Scheduler, question: int, **loaded: Any) -> None:
    """All ranks answer."""
    digests = tuple((int(number[1:]), digest) for number, digest in loaded.items())
    listed = LoadedAdapterList(question, digests)
    adapter.update_from_reports([RankReport(0, (), (), adapters=listed)])


def settle(engine: ShadowEngine, **loaded: Any) -> None:
    """Steps that answer whatever is asked, until all is done."""
    for _ in range(2000):
        if not engine.scheduler.has_requests():
            return
        engine.step()
        if question := engine.plans[-1].adapter_question:
            tell(engine.adapter, question, **loaded)
    raise AssertionError(f"stuck: {engine.live}")


def lora(folder: Path) -> LoRARequest:
    return LoRARequest("mine", 1, str(folder))


@pytest.mark.parametrize(
    ("replaced", "stores"), [((), 3), (("mine",), 3), (("mine", "another"), 1)], ids=str
)
def test_an_adapter_that_came_back_may_have_been_another_in_between(
    engine: ShadowEngine, folder: Path, replaced: tuple[str, ...], stores: int
) -> None:
    """With load_inplace, and files that were changed and changed back."""
    name = AdapterDigests().digest(folder)
    engine.add(prompt(2 * CHUNK + 20), 6 * CHUNK + 1, lora_request=lora(folder))
    while not (question := engine.plans[-1].adapter_question if engine.plans else 0):
        engine.step()
    tell(engine.adapter, question, _1=name)
    while engine.adapter.tally.totals.total("store_jobs") == 0:
        engine.step()
    before = tuple((1, name if each == "mine" else each) for each in replaced)
    listed = LoadedAdapterList(0, ((1, name),), number=5, replaced=before)
    engine.adapter.update_from_reports([RankReport(0, (), (), adapters=listed)])
    settle(engine)
    assert engine.adapter.tally.totals.total("store_jobs") == stores
    assert engine.plans[-1].acked_adapters in ((), (5,))
    assert any(plan.acked_adapters == (5,) for plan in engine.plans)
    engine.check_whole()
