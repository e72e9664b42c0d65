"""Requests with images and adapters on vLLM's real scheduler: what waits, what is stored."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from lmcache_connector.plans import LoadedAdapterList, RankReport
from lmcache_connector.requests import adapters as adapters_module
from lmcache_connector.requests.adapters import AdapterDigests
from lmcache_connector.scheduler.scheduler import Scheduler
from tests.support.doubles.shadow_engine import STOP_TOKEN, ShadowEngine, Shape
from tests.support.doubles.shadow_worker import Faults

CHUNK = Shape().chunk_size


@pytest.fixture
def engine(model: Path) -> ShadowEngine:
    return ShadowEngine(model, Shape(), 0, Faults(slow=0.0), reads_requests=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


def prompt(num_tokens: int) -> list[int]:
    return [STOP_TOKEN + 1 + i % 3 for i in range(num_tokens)]


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


def test_a_request_waits_for_its_adapter_and_for_what_the_ranks_say(
    engine: ShadowEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()
    digest = AdapterDigests.digest

    def late(self: Any, path: Path) -> str:
        may_read.wait(10.0)
        return digest(self, path)

    monkeypatch.setattr(AdapterDigests, "digest", late)
    engine.add(prompt(2 * CHUNK), 1, lora_request=lora(folder))
    plain = engine.add(prompt(CHUNK), 1)
    for _ in range(20):
        engine.step()
    assert engine.requests[plain].is_finished(), "others run meanwhile"
    questions = [plan.adapter_question for plan in engine.plans if plan.adapter_question]
    assert questions == [1], "asked once"
    may_read.set()
    for _ in range(20):
        engine.step()
    assert engine.live, "no rank has answered"
    tell(engine.adapter, 1)
    settle(engine)
    assert engine.adapter.tally.total("store_jobs") == 2
    stored = [job for plan in engine.plans for job in plan.stores]
    assert [job.adapter is not None for job in stored] == [False, True]
    engine.check_whole()


def test_nothing_is_stored_or_vouched_for_once_a_rank_has_loaded_another(
    engine: ShadowEngine, folder: Path
) -> None:
    engine.add(prompt(2 * CHUNK), 3 * CHUNK, lora_request=lora(folder))
    while not (question := engine.plans[-1].adapter_question if engine.plans else 0):
        engine.step()
    tell(engine.adapter, question)
    while engine.adapter.tally.total("store_jobs") == 0:
        engine.step()
    assert len(engine.adapter.witness) > 0
    tell(engine.adapter, 0, _1="another")
    assert len(engine.adapter.witness) == 0
    settle(engine)
    assert engine.adapter.tally.total("store_jobs") == 1
    engine.check_whole()


def test_an_adapter_the_ranks_have_loaded_differently_bypasses(
    engine: ShadowEngine, folder: Path
) -> None:
    engine.add(prompt(2 * CHUNK), 1, lora_request=lora(folder))
    settle(engine, _1="another")
    assert engine.adapter.tally.total("store_jobs") == 0
    assert engine.adapter.tally.total("bypassed_requests", "adapter") == 1
    engine.check_whole()


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
    while engine.adapter.tally.total("store_jobs") == 0:
        engine.step()
    before = tuple((1, name if each == "mine" else each) for each in replaced)
    listed = LoadedAdapterList(0, ((1, name),), number=5, replaced=before)
    engine.adapter.update_from_reports([RankReport(0, (), (), adapters=listed)])
    settle(engine)
    assert engine.adapter.tally.total("store_jobs") == stores
    assert engine.plans[-1].heard_adapters in ((), (5,))
    assert any(plan.heard_adapters == (5,) for plan in engine.plans)
    engine.check_whole()


def test_files_of_adapters_are_never_touched_on_the_schedulers_thread(
    engine: ShadowEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's file system may take seconds for either."""
    threads: set[str] = set()

    def seen(touch: Any) -> Any:
        def touched(*args: Any) -> Any:
            threads.add(threading.current_thread().name)
            return touch(*args)

        return touched

    for name in ("adapter_stamp", "_digest_files"):
        monkeypatch.setattr(adapters_module, name, seen(getattr(adapters_module, name)))
    adapters = engine.adapter.book.identifier.adapters
    monkeypatch.setattr(adapters, "_find_folder", seen(adapters._find_folder))
    monkeypatch.setattr(adapters_module, "_LOOK_SECONDS", 0.0)  # read again while it queues
    engine.add(prompt(2 * CHUNK), CHUNK, lora_request=lora(folder))
    settle(engine)
    assert engine.adapter.tally.total("store_jobs") > 0
    assert threads == {"lmc-adapters"}
