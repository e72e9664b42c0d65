"""A rank stores for a LoRA adapter only what it has computed with that very adapter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lmcache_connector.plans import AdapterRef, LoadedAdapterList, Outcome, StepPlan
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.threads import Task
from lmcache_connector.vllm_compat.lora_loads import LoraLoads
from lmcache_connector.worker.adapter import WorkerAdapter
from lmcache_connector.worker.lmcache_start import RankSettings
from tests.support.jobs import one_part, store_job, tier_config
from tests.support.workers import FixedWeights, SteppedWorker

GEOMETRY = ChunkGeometry(32, 0, (128,), (0, 1), 2, "bfloat16")
MINE = AdapterRef(1, "mine")


class Loads(LoraLoads):
    """The test says what has been loaded. ``has_updates``: a question is open."""

    def __init__(self) -> None:
        super().__init__(None)
        self.names: dict[int, tuple[Task[str], ...]] = {}
        self.acked_list = 0
        self.question = 0

    @property
    def has_updates(self) -> bool:
        return bool(self.question)

    def ask(self, question: int) -> None:
        self.question = question

    def take(self) -> LoadedAdapterList | None:
        question, self.question = self.question, 0
        return LoadedAdapterList(question) if question else None

    def note_acked(self, list_number: int) -> None:
        self.acked_list = list_number

    def names_of(self, number: int) -> tuple[Task[str], ...]:
        return self.names.get(number, ())

    def load(self, number: int) -> Task[str]:
        name: Task[str] = Task()
        self.names[number] = (name,)
        return name


@pytest.fixture
def loads() -> Loads:
    return Loads()


@pytest.fixture
def worker(loads: Loads) -> Iterator[SteppedWorker]:
    cache = {"layers.0": torch.randn(16, 2, 16, 64).bfloat16()}
    settings = RankSettings(
        tier_config(0.01),
        parts=one_part(GEOMETRY, 16),
    )
    worker = WorkerAdapter(settings, cache, None, FixedWeights(), lora_loads=loads)
    yield SteppedWorker(worker, cache)
    worker.shutdown()


def store(job_id: int, adapter: AdapterRef | None = MINE) -> StepPlan:
    key = bytes([job_id]) * 32
    return StepPlan(stores=(store_job(job_id, "r", (key,), ((0, 1),), adapter=adapter),))


def test_a_store_waits_for_the_name_of_what_was_loaded(worker: SteppedWorker, loads: Loads) -> None:
    name = loads.load(1)
    worker.run(store(1))
    assert not worker.results
    name.settle("mine")
    assert worker.outcome(1) is Outcome.DONE


def test_a_store_without_an_adapter_asks_for_none(worker: SteppedWorker, loads: Loads) -> None:
    loads.load(1).settle("another")
    worker.run(store(2, None))
    assert worker.outcome(2) is Outcome.DONE


def test_it_counts_what_was_loaded_when_the_store_came(worker: SteppedWorker, loads: Loads) -> None:
    before = loads.load(1)
    worker.run(store(1))
    loads.load(1).settle("mine")
    before.settle("another")
    assert worker.outcome(1) is Outcome.CANCELLED


def test_without_the_adapter_nothing_is_stored(worker: SteppedWorker) -> None:
    worker.run(store(1))
    assert worker.results[1].outcome is Outcome.CANCELLED, "at once: there may be no next step"


def test_questions_are_answered_with_the_step_and_plans_say_what_was_heard(
    worker: SteppedWorker, loads: Loads
) -> None:
    (report,) = worker.run(StepPlan(idle=True, adapter_question=3, acked_adapters=(7,)))
    assert report.adapters == LoadedAdapterList(3)
    assert loads.acked_list == 7


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["another"], Outcome.CANCELLED),
        ([None], Outcome.CANCELLED),
        (["mine", "another", "mine"], Outcome.CANCELLED),
        (["another", "mine", "another"], Outcome.CANCELLED),
        (["mine", None, "mine"], Outcome.CANCELLED),
        (["another", "mine"], Outcome.DONE),
        (["mine", "mine"], Outcome.DONE),
    ],
)
def test_what_another_adapter_may_have_computed_is_not_stored(
    worker: SteppedWorker, loads: Loads, names: list[str | None], found: Outcome
) -> None:
    """Reloaded in place, also there and back again, before the scheduler side has heard of it."""
    loads.names[1] = tuple(loads.load(1) for _ in names)
    for reading, name in zip(loads.names[1], names, strict=True):
        reading.settle(name)
    worker.run(store(1))
    assert worker.outcome(1) is found
