"""Loads of a real worker side behind a slow or silent Redis: what is used, and what is not touched.

The paged cache, the copies, LMCache, the tier and Valkey are real; only vLLM is missing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from lmcache_connector.connector import LMCacheTieredConnector, PlanMetadata
from lmcache_connector.plans import (
    CacheEvent,
    Fetched,
    LoadJob,
    Outcome,
    RankStart,
    StepPlan,
    TransferUpdate,
)
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.worker.adapter import WorkerAdapter
from lmcache_connector.worker.lmcache_start import RankSettings
from lmcache_connector.worker.redis_writes import Pace
from tests.support.clock import wait_until, within
from tests.support.costs import product_frames
from tests.support.jobs import load_job, one_part, store_job, tier_config
from tests.support.redis.servers import Server, free_port, running_valkey
from tests.support.redis.slow_proxy import SlowLink, SlowProxy
from tests.support.vllm_configs import vllm_config
from tests.support.workers import FixedWeights, SteppedWorker

LAYERS, HEADS, BLOCK_SIZE, WIDTH = 4, 2, 16, 64  # WIDTH: elements of K and V, one token and head
CHUNK_TOKENS, NUM_BLOCKS = 32, 128
GEOMETRY = ChunkGeometry(
    CHUNK_TOKENS, 0, (2 * WIDTH,) * LAYERS, tuple(range(HEADS)), HEADS, "bfloat16"
)
LONG = 60.0
KEYS = tuple(random.Random(i).randbytes(32) for i in range(40))
PROBE_KEYS = tuple(random.Random(-i - 1).randbytes(32) for i in range(4))


@pytest.fixture
def link() -> SlowLink:
    return SlowLink()


@pytest.fixture
def port(valkey: Server, link: SlowLink) -> Iterator[int]:
    with SlowProxy(valkey.port, link) as proxy:
        yield proxy.port
        link.set()


def make_instance(
    port: int,
    probe: bool = False,
    pace: Pace | None = None,
    weights: FixedWeights | None = None,
    login: str = "",
    **tier: Any,
) -> SteppedWorker:
    """``tier``: settings of the Redis tier."""
    torch.manual_seed(random.randrange(1 << 30))
    cache = {
        f"layers.{i}": torch.randn(NUM_BLOCKS, HEADS, BLOCK_SIZE, WIDTH).bfloat16()
        for i in range(LAYERS)
    }
    settings = RankSettings(
        tier_config(0.05),
        parts=one_part(GEOMETRY, BLOCK_SIZE),
        probe_keys=PROBE_KEYS if probe else (),
    )
    tier = {"read_timeout_seconds": LONG, "backoff_max_seconds": 0.2} | tier
    config = RedisTierConfig(url=f"redis://{login}127.0.0.1:{port}", **tier)
    redis = RedisTier(config, PartGeometries((GEOMETRY,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "for_lifetime", lambda seconds: pace or Pace())
        worker = WorkerAdapter(settings, cache, redis, weights or FixedWeights())
    return SteppedWorker(worker, cache)


@pytest.fixture
def written(valkey: Server, port: int) -> list[torch.Tensor]:
    """All chunks of KEYS are in Redis, and in no CPU tier; the blocks they were stored from."""
    writer = make_instance(port)
    block_ids = range(2 * len(KEYS))
    job = store_job(1, "writer", KEYS, (tuple(block_ids),))
    writer.run(StepPlan(stores=(job,)))
    assert writer.wait_for(1).outcome is Outcome.DONE
    kept = writer.blocks(block_ids)
    with valkey.client() as client:
        wait_until(lambda: client.dbsize() == HEADS * len(KEYS), "chunks are not written")
    writer.worker.shutdown()
    return kept


@pytest.fixture
def reader(written: list[torch.Tensor], port: int) -> Iterator[SteppedWorker]:
    with make_instance(port) as instance:
        yield instance


def test_what_was_planned_with_other_weights_is_neither_stored_nor_loaded(port: int) -> None:
    weights = FixedWeights()
    with make_instance(port, weights=weights) as instance:
        store = store_job(1, "r", KEYS[:1], ((0, 1),))
        instance.run(StepPlan(stores=(store,), acked_weights=(weights.changes.number,)))
        assert instance.wait_for(1).outcome is Outcome.DONE
        before = weights.changes.number
        weights.changes.add()
        untouched = instance.blocks(range(4, 6))
        for job_id, outcome in ((2, Outcome.CANCELLED), (4, Outcome.DONE)):
            store = store_job(job_id, "r", KEYS[job_id : job_id + 1], ((2, 3),))
            load = load_job(job_id + 1, "r", KEYS[:1], ((4, 5),), deadline_seconds=20.0)
            acked = (before if outcome is Outcome.CANCELLED else weights.changes.number,)
            instance.run(StepPlan(loads=(load,), stores=(store,), acked_weights=acked))
            assert instance.wait_for(job_id).outcome is outcome
            assert instance.wait_for(job_id + 1).outcome is outcome
            are_there = all(map(torch.equal, instance.blocks(range(4, 6)), untouched))
            assert are_there == (outcome is Outcome.CANCELLED)


def test_what_a_job_finds_in_memory_or_does_not_find_is_told(port: int) -> None:
    """Had the scheduler side known, it would have planned another job."""
    with make_instance(port) as instance:
        store, again = (store_job(number, "r", KEYS[:1], ((0, 1),)) for number in (1, 2))
        load = load_job(3, "r", KEYS[:2], ((4, 5, 6, 7),), deadline_seconds=20.0)
        for number, plan in enumerate(
            (StepPlan(stores=(store,)), StepPlan(stores=(again,)), StepPlan(loads=(load,))), 1
        ):
            instance.run(plan)
            instance.wait_for(number)
        assert instance.events == [
            CacheEvent(KEYS[0], admitted=True),
            CacheEvent(KEYS[0], admitted=True),
            CacheEvent(KEYS[1], admitted=False),
        ]


def test_what_may_have_come_out_of_order_is_told_anew(port: int) -> None:
    """After a report that came late, the scheduler side may go by an old list of adapters."""
    with make_instance(port) as instance:
        (first,) = instance.run(StepPlan(adapter_question=1))
        assert first.adapters is not None
        instance.wait_for_quiet()
        instance.worker.report_all(KEYS[:1])
        (report,) = instance.run(StepPlan())
    assert CacheEvent(KEYS[0], admitted=False) in report.events
    assert report.adapters == replace(first.adapters, number=2)
    assert None not in (report.start, report.weights)


def test_the_end_of_a_kv_transfer_comes_with_a_report(port: int) -> None:
    """By the report's arrival the connector knows that vLLM has heard of the end."""
    with make_instance(port) as instance:
        instance.wait_for_quiet()
        update = TransferUpdate("transfer", ends_after=frozenset(), held_request="request")
        instance.worker.end_forward(StepPlan(transfers=(update,)))
        output = instance.worker.finish_step()
    assert (output.finished_sending, len(output.reports)) == (frozenset({"request"}), 1)


def test_an_event_says_whether_a_chunk_is_here_now(port: int) -> None:
    """Whatever has become of it since the last report."""
    with make_instance(port) as instance:
        instance.run(StepPlan(stores=(store_job(1, "r", KEYS[:1], ((0, 1),)),)))
        instance.wait_for(1)
        cpu = instance.worker._tiers.engine.cpu

        def events() -> tuple[CacheEvent, ...]:
            return sum((r.events for r in instance.worker.finish_step().reports), ())

        memory: Any = cpu.get(KEYS[0])
        cpu.forget(KEYS[0])
        cpu.put(KEYS[0], memory)
        memory.ref_count_down()
        assert events() == (CacheEvent(KEYS[0], admitted=True),)
        cpu.forget(KEYS[0])
        assert events() == (CacheEvent(KEYS[0], admitted=False),)
        assert events() == ()


def test_the_pattern_of_the_self_test_stays_on_the_host() -> None:
    with running_valkey() as server:
        instance = make_instance(server.port)
        assert instance.worker.self_test is not None
        instance.worker.shutdown()  # writes what is queued
        with server.client() as client:
            assert client.keys() == []


def test_lmcache_never_shows_the_secret(valkey: Server, capfd: pytest.CaptureFixture[str]) -> None:
    with valkey.client() as client:
        client.execute_command("ACL", "SETUSER", "u", "on", ">hunter2", "~*", "+@all")
        instance = make_instance(valkey.port, login="u:hunter2@")
        instance.run(StepPlan(stores=(store_job(1, "r", KEYS[:1], ((0, 1),)),)))
        assert instance.wait_for(1).outcome is Outcome.DONE
        instance.worker.shutdown()  # writes what is queued
        assert client.dbsize() > 0
    shown = capfd.readouterr()
    assert "hunter2" not in shown.out + shown.err


def load(job_id: int, chunks: range, first_block: int, deadline: float = LONG) -> LoadJob:
    block_ids = tuple(range(first_block, first_block + 2 * len(chunks)))
    keys = tuple(KEYS[i] for i in chunks)
    return load_job(
        job_id, f"r{job_id}", keys, (block_ids,), deadline_seconds=deadline, may_fetch=True
    )


def same(blocks: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(blocks, others, strict=True))


def stored(written: list[torch.Tensor], chunks: range) -> list[torch.Tensor]:
    return [layer[2 * chunks.start : 2 * chunks.stop] for layer in written]


def connected(reader: SteppedWorker) -> None:
    """Loads one chunk, so that the tier has its connections."""
    numbers = count(9000)

    def loads() -> bool:
        job_id = next(numbers)
        reader.run(StepPlan(loads=(load(job_id, range(39, 40), 126),)))
        return reader.wait_for(job_id).outcome is Outcome.DONE

    wait_until(loads, "the tier does not connect")


def test_late_bytes_never_land_in_a_block_that_was_given_back(
    reader: SteppedWorker, written: list[torch.Tensor], link: SlowLink
) -> None:
    connected(reader)
    link.set(stalled=True)
    before = reader.blocks(range(80))
    reader.run(StepPlan(loads=(load(1, range(39), 0, deadline=0.1),)))
    result = reader.wait_for(1)
    assert (result.outcome, result.num_chunks) == (Outcome.DEADLINE, 0)
    assert result.has_fetch_failed
    assert same(reader.blocks(range(80)), before)
    link.set()  # now the bytes come, when the blocks may be another request's
    reader.run(StepPlan(loads=(load(2, range(20, 39), 80),)))
    assert reader.wait_for(2).outcome is Outcome.DONE
    assert same(reader.blocks(range(80, 80 + 38)), stored(written, range(20, 39)))
    assert same(reader.blocks(range(80)), before)


def test_a_load_from_memory_asks_no_redis_for_what_memory_has_lost(
    reader: SteppedWorker, link: SlowLink
) -> None:
    link.set(stalled=True)
    job = load_job(1, "r", KEYS, (tuple(range(2 * len(KEYS))),), deadline_seconds=8.0)
    began = time.monotonic()
    reader.run(StepPlan(loads=(job,)))
    assert reader.wait_for(1).outcome is Outcome.MISSING
    assert time.monotonic() - began < 6.0


@pytest.mark.parametrize("why", ["Redis lacks it", "no memory"])
def test_a_load_that_ends_early_tells_whether_redis_lacks_a_chunk(
    reader: SteppedWorker, valkey: Server, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    connected(reader)
    cpu = reader.worker._tiers.engine.cpu
    allocate = cpu.allocate
    if why == "Redis lacks it":
        with valkey.client() as client:
            assert client.delete(*client.keys(f"*{KEYS[2].hex()}*"))
    else:
        monkeypatch.setattr(
            cpu, "allocate", lambda k, at: allocate(k, at) if k != KEYS[2] else None
        )
    reader.run(StepPlan(loads=(load(1, range(5), 0),)))
    result = reader.wait_for(1)
    assert (result.outcome, result.num_chunks) == (Outcome.MISSING, 2)
    assert [each.lacks_next for each in result.fetched] == [why == "Redis lacks it"]


@pytest.mark.parametrize("is_away", [False, True])
def test_a_server_that_is_away_is_known_to_be(valkey: Server, is_away: bool) -> None:
    with make_instance(free_port() if is_away else valkey.port, probe=True) as instance:
        started(instance)
        assert probed(instance).has_failed == is_away
        wait_until(lambda: instance.worker.redis_is_away == is_away, "state of the server")


def test_a_probe_that_may_not_write_tells_whether_redis_answers() -> None:
    with running_valkey() as server:
        with server.client() as client:
            client.execute_command("ACL SETUSER default -@write")
        link = SlowLink()
        with (
            SlowProxy(server.port, link) as proxy,
            make_instance(proxy.port, probe=True) as instance,
        ):
            _, first = started(instance).measured
            assert (first.num_bytes, first.has_failed) == (0, False)
            link.set(stalled=True)
            assert probed(instance).has_failed
            link.set()
            assert not probed(instance).has_failed


def started(instance: SteppedWorker) -> RankStart:
    """The worker tells once what it found out at start."""
    for _ in range(20_000):
        for report in instance.worker.finish_step().reports:
            if report.start is not None:
                assert not instance.worker.finish_step().reports
                return report.start
        threading.Event().wait(0.001)
    raise AssertionError("the start is not told")


def probed(instance: SteppedWorker) -> Fetched:
    instance.worker.start_loads(StepPlan(probe=True, idle=True))
    for _ in range(20_000):
        for report in instance.worker.finish_step().reports:
            if report.measured:
                return report.measured[0]
        threading.Event().wait(0.001)
    raise AssertionError("the probe does not answer")


# -- quiet steps -----------------------------------------------------------------------------------


MAX_FRAMES = 17
"""Python frames of the product, for all calls of vLLM's model runner in a step. It was 44."""


@pytest.fixture
def instance(valkey: Server) -> Iterator[SteppedWorker]:
    with make_instance(valkey.port) as instance:
        yield instance


@pytest.fixture
def connector(
    model: Path, instance: SteppedWorker, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LMCacheTieredConnector]:
    """A connector with the worker side, put where vLLM's model runner looks for it."""
    connector = object.__new__(LMCacheTieredConnector)
    connector._scheduler, connector._worker = None, instance.worker
    connector._step = connector._step_output = connector._scheduler = connector._guard = None
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    with set_forward_context(None, vllm_config(model)):
        yield connector


def run_step(connector: LMCacheTieredConnector, metadata: KVConnectorMetadata) -> bool:
    """As vLLM's runner does. Whether something was reported."""
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = metadata
    connector.handle_preemptions(metadata)
    with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as found:
        pass
    assert found is not None
    return found.kv_connector_worker_meta is not None


def come_to_rest(connector: LMCacheTieredConnector) -> None:
    idle = PlanMetadata(StepPlan(idle=True))
    assert within(20.0, lambda: not run_step(connector, idle))


def test_a_quiet_step_takes_few_frames(connector: LMCacheTieredConnector) -> None:
    come_to_rest(connector)
    run_step(connector, PlanMetadata(None))
    frames = product_frames(lambda: run_step(connector, PlanMetadata(None)))
    assert frames.total() <= MAX_FRAMES, frames
