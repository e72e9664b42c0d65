"""No request is given a key before all ranks have said which model they run."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.plans import Fetched, RankReport, RankStart, Tier
from lmcache_connector.scheduler.engine_start import EngineStart
from tests.support.clock import Clock
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_worker import VOCABULARY, Faults

MEASURED = tuple((Fetched(Tier.CPU, rank + 1, 1.0),) for rank in range(3))


def make(world_size: int, clock: Clock | None = None) -> EngineStart:
    def make_hasher(configuration: object) -> PrefixHasher:
        return PrefixHasher({"configuration": configuration}, 16)

    return EngineStart(world_size, make_hasher, clock or Clock())


def report(rank: int, **configuration: str) -> RankReport:
    start = RankStart(tuple(sorted(configuration.items())), MEASURED[rank])
    return RankReport(rank, (), (), start=start)


def test_requests_wait_for_the_last_rank() -> None:
    start = make(3)
    assert start.is_awaited()
    assert start.update([report(2, a="1"), report(0, a="1")]) == ()
    assert start.update([RankReport(1, (), ())]) == ()
    assert start.is_awaited()
    assert start.hasher is None
    assert start.update([report(1, a="1")]) == MEASURED
    assert start.hasher is not None


def test_keys_are_those_of_what_the_ranks_see() -> None:
    keys = set()
    for configuration in ({"a": "1"}, {"a": "2"}, {"a": "1", "b": "1"}):
        for world_size in (1, 2):
            start = make(world_size)
            start.update([report(rank, **configuration) for rank in range(world_size)])
            keys.add(start.known_hasher.root_key({}))
    assert len(keys) == 3


def test_ranks_that_disagree_end_it(caplog: pytest.LogCaptureFixture) -> None:
    start = make(2)
    assert start.update([report(0, a="1", b="1"), report(1, a="1", b="2")])
    assert start.hasher is None
    assert not start.is_awaited()
    (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "they differ in b" in line.getMessage()


def test_the_wait_is_bounded_and_a_late_report_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    start = make(2, clock)
    clock.now += 1000.0  # nobody has asked yet
    start.update([report(0)])
    assert start.is_awaited()
    clock.now += 9.9
    assert start.is_awaited()
    clock.now += 0.2
    assert not any(start.is_awaited() for _ in range(3))
    (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "ranks [1] have not reported within 10 s" in line.getMessage()
    start.update([report(1)])
    assert start.hasher is not None


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_vllm_asks_again_until_the_ranks_have_reported(model: Path, role: str) -> None:
    engine = ShadowEngine(model, Shape(role=role, world_size=2), 0, Faults(slow=0.0), started=False)
    tokens = random.Random(0).choices(range(VOCABULARY), k=100)
    request = engine.add(tokens, 2)
    for _ in range(5):
        engine.step()
    assert all(plan.idle for plan in engine.plans)
    engine.report_start(1)
    engine.step()
    assert engine.plans[-1].idle
    engine.report_start(0)
    engine.run_until_idle()
    engine.check_answer(request)
    engine.check_whole()
    assert (engine.adapter.tally.total("store_jobs") > 0) == (role != "kv_consumer")
