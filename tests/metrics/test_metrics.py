"""Samples add up over ranks, steps and engines, and reach Prometheus as they should."""

from __future__ import annotations

import json
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lmcache_connector.metrics.log_line import log_fields
from lmcache_connector.metrics.prometheus import TablePromMetrics, TieredStats
from lmcache_connector.metrics.samples import Samples
from lmcache_connector.metrics.table import METRICS, Kind
from lmcache_connector.metrics.tally import Tally
from lmcache_connector.plans import CacheEvent, JobResult, LoadJob, Outcome, StoreJob
from lmcache_connector.scheduler.metrics import SchedulerMetrics
from lmcache_connector.storage.redis.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.counters import TierCounts, WriteEnd
from lmcache_connector.storage.redis.tier import RedisTierStats
from lmcache_connector.worker.metrics import RankSnapshot, WorkerMetrics

LOAD = LoadJob(1, "r", (b"k",), ((0,),), 0, 1.0, True, 0)
STORE = StoreJob(2, "r", (b"k",), (0,), ((0,),))
TIER = RedisTierStats(
    counts=TierCounts(
        chunks_hit=3,
        misses={"missing": 1},
        writes={WriteEnd.WRITTEN: 4, WriteEnd.QUEUE_FULL: 5, WriteEnd.FAILED: 1},
        bytes_written=400,
    ),
    queued_bytes=7,
    servers=(("host:6379", CircuitState.OPEN),),
    writes_paused=True,
)
# Numbers that floats add up exactly, in any order.
amounts = st.integers(1, 1 << 20)


@st.composite
def samples(draw: st.DrawFn) -> Samples:
    made = Samples()
    for tier in draw(st.lists(st.sampled_from(["cpu", "redis"]), max_size=4)):
        made.count("loaded_bytes", tier, amount=draw(amounts))
        made.observe("load_seconds", tier, value=draw(amounts))
    if draw(st.booleans()):
        made.set("cpu_used_bytes", draw(st.sampled_from("01")), value=draw(amounts))
    return made


@given(st.lists(samples(), max_size=6), st.integers(0, 6))
def test_samples_add_up_however_they_are_grouped(parts: list[Samples], cut: int) -> None:
    one_by_one, head, tail = Samples(), Samples(), Samples()
    for index, part in enumerate(parts):
        one_by_one.merge(part)
        (head if index < cut else tail).merge(part)
    head.merge(Samples.from_data(json.loads(json.dumps(tail.to_data()))))
    assert head == one_by_one
    assert head.total("loaded_bytes") == sum(p.total("loaded_bytes") for p in parts)


def test_a_counter_never_shrinks() -> None:
    with pytest.raises(ValueError, match="loaded_bytes must not shrink"):
        Samples().count("loaded_bytes", "cpu", amount=-1)


class Rank:
    """A rank whose counts the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0
        self.redis: RedisTierStats | None = TIER
        self.metrics = WorkerMetrics(0, self._look, lambda: self.now)

    def _look(self) -> RankSnapshot:
        self.looks += 1
        return RankSnapshot(2, 10, 100, self.redis, [(100, 0.5)] if self.looks == 1 else [])


def test_a_load_counts_for_both_tiers_it_passed() -> None:
    rank = Rank()
    rank.metrics.job_ended(LOAD, JobResult(1, Outcome.DONE, 1, 800, 600, 0.5, 0.3))
    rank.metrics.job_ended(STORE, JobResult(2, Outcome.MISSING, 1, 100, 0, 0.5))
    taken = rank.metrics.take()
    assert taken is not None
    assert taken.total("loaded_bytes", "cpu") == 800
    assert taken.total("loaded_bytes", "redis") == 600
    assert taken.observed("load_seconds", "redis") == [0.3]
    assert taken.observed("load_bytes_per_second", "redis") == [2000]
    assert taken.observed("load_seconds", "cpu") == [0.2]
    assert taken.observed("store_bytes_per_second", "cpu") == [200]
    assert taken.observed("store_bytes_per_second", "redis") == [200]
    assert taken.counters["failed_stores\nmissing"] == 1
    assert taken.total("failed_loads") == 0


def test_the_redis_tiers_counts_come_as_increments() -> None:
    rank = Rank()
    first = rank.metrics.take()
    assert first is not None
    assert first.counters == {
        "redis_chunks\nhit": 3,
        "redis_chunks\nmissing": 1,
        "written_chunks\nwritten": 4,
        "dropped_writes\nqueue_full": 5,
        "dropped_writes\nfailed": 1,
        "stored_bytes\nredis": 400,
    }
    assert first.gauges["circuit_state\n0\nhost:6379"] == 2
    assert first.gauges["writes_paused\n0"] == 1
    rank.now = 10.0
    second = rank.metrics.take()
    assert second is not None
    assert second.counters == {}
    assert second.gauge_total("write_queue_bytes") == 7


def test_an_uneventful_step_looks_at_nothing() -> None:
    rank = Rank()
    rank.metrics.take()
    assert [rank.metrics.take() for _ in range(100)] == [None] * 100
    assert rank.looks == 1
    rank.metrics.cache_changed([CacheEvent(b"k", True), CacheEvent(b"l", False)])
    evicted = rank.metrics.take()
    assert evicted is not None
    assert evicted.counters == {"evicted_chunks\ncpu": 1}


def test_the_scheduler_side_tells_what_changed() -> None:
    tally, seconds = Tally(), [0.25]
    metrics = SchedulerMetrics(
        tally,
        lambda: 0.0,
        lambda: [seconds.pop()] if seconds else [],
        lambda: (("h:1", CircuitState.TRIAL),),
    )
    tally.count("lookups", "redis", amount=2)
    tally.count("hit_tokens", "cpu", amount=512)
    tally.count("decisions", "load_faster", amount=3)
    taken = metrics.take(is_idle=True)
    assert taken is not None
    assert taken.total("lookups", "redis") == 2
    assert taken.total("hit_tokens", "cpu") == 512
    assert taken.counters["decisions\nload_faster"] == 3
    assert taken.observed("lookup_seconds", "redis") == [0.25]
    assert taken.gauges["circuit_state\nscheduler\nh:1"] == 1
    assert metrics.take(is_idle=True) is None
    tally.count("decisions", "load_faster")
    again = metrics.take(is_idle=True)
    assert again is not None
    assert again.counters == {"decisions\nload_faster": 1}
    assert again.gauges == {}, "the circuits are as they were"
    assert tally.total("decisions") == 4


def test_while_requests_run_the_scheduler_side_is_looked_at_now_and_then() -> None:
    tally, now = Tally(), 100.0
    metrics = SchedulerMetrics(tally, lambda: now)
    assert metrics.take(is_idle=False) is None
    tally.count("store_jobs")
    assert metrics.take(is_idle=False) is None, "a step ago"
    now += 1.0
    assert taken_jobs(metrics, is_idle=False) == 1
    tally.count("store_jobs", amount=2)
    assert metrics.take(is_idle=False) is None
    assert taken_jobs(metrics, is_idle=True) == 2  # there may be no next step


def taken_jobs(metrics: SchedulerMetrics, is_idle: bool) -> float:
    taken = metrics.take(is_idle=is_idle)
    assert taken is not None
    return taken.total("store_jobs")


def prom_metrics(registry: CollectorRegistry, engines: int) -> TablePromMetrics:
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    values: dict[int, list[object]] = {i: ["m", str(i)] for i in range(engines)}
    return TablePromMetrics(METRICS, config, types, ["model_name", "engine"], values)


def test_each_engine_and_rank_reaches_prometheus_as_itself() -> None:
    registry = CollectorRegistry()
    prom = prom_metrics(registry, engines=2)
    ranks = [Samples(), Samples()]
    for index, rank in enumerate(ranks):
        rank.count("loaded_bytes", "cpu", amount=100)
        rank.set("cpu_used_bytes", str(index), value=10 + index)
        rank.observe("load_seconds", "cpu", value=0.002)
    scheduler = Samples()
    scheduler.count("hit_tokens", "cpu", amount=256)
    stats = TieredStats.of(ranks[0])
    for other in (ranks[1], scheduler):
        stats = stats.aggregate(TieredStats.of(other))
    assert not stats.is_empty()
    for _ in range(2):
        prom.observe(json.loads(json.dumps(stats.to_dict())), engine_idx=1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:lmcache_{name}", {"model_name": "m", **labels})

    assert value("loaded_bytes_total", engine="1", tier="cpu") == 400
    assert value("loaded_bytes_total", engine="0", tier="cpu") == 0
    assert value("hit_tokens_total", engine="1", tier="cpu") == 512
    assert value("cpu_used_bytes", engine="1", rank="1") == 11
    assert value("cpu_used_bytes", engine="0", rank="1") is None
    assert value("load_seconds_count", engine="1", tier="cpu") == 4
    assert value("load_seconds_bucket", engine="1", tier="cpu", le="0.0025") == 4
    assert value("load_seconds_bucket", engine="1", tier="cpu", le="0.001") == 0


def test_names_follow_the_conventions() -> None:
    """https://prometheus.io/docs/practices/naming: base units last, counters without the suffix
    that the client library adds."""
    units = ("bytes", "seconds", "tokens", "bytes_per_second", "jobs", "chunks")
    for metric in METRICS.values():
        assert re.fullmatch(r"vllm:lmcache_[a-z_]+", metric.full_name)
        assert not metric.name.endswith("_total")
        assert metric.documentation.endswith(".")
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith(units)
            assert list(metric.buckets) == sorted(metric.buckets)
    assert all(name == metric.name for name, metric in METRICS.items())


def test_the_log_line_reads_as_one_line() -> None:
    interval = Samples()
    interval.count("queried_tokens", amount=10000)
    interval.count("hit_tokens", "cpu", amount=6144)
    interval.count("hit_tokens", "redis", amount=2048)
    interval.count("loaded_bytes", "redis", amount=32 << 20)
    interval.observe("load_seconds", "redis", value=0.02)
    interval.count("failed_loads", "deadline", amount=2)
    interval.set("cpu_capacity_bytes", "0", value=2 << 30)
    interval.set("cpu_used_bytes", "0", value=1 << 30)
    interval.set("circuit_state", "0", "h:1", value=2)
    line = ", ".join(f"{k}={v}" for k, v in TieredStats.of(interval).reduce().items())
    assert line == (
        "hit tokens=8192 of 10000 (CPU 6144, Redis 2048), fetched from Redis=32 MiB at 1.7 GB/s, "
        "failed loads=2, CPU tier=50% of 2 GiB, Redis=DOWN"
    )
    assert log_fields(Samples()) == {}


def test_vllm_adds_up_the_ranks_and_ships_the_sum() -> None:
    """vLLM's own aggregation over ranks, one of which has nothing to tell, and serialisation."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    def output(stats: TieredStats | None) -> ModelRunnerOutput:
        told = KVConnectorOutput(kv_connector_stats=stats)
        return ModelRunnerOutput([], {}, kv_connector_output=told)

    ranks = []
    for _ in range(2):
        rank = Rank()
        rank.metrics.job_ended(LOAD, JobResult(1, Outcome.DONE, 1, 800, 600, 0.5, 0.3))
        taken = rank.metrics.take()
        assert taken is not None
        ranks.append(output(TieredStats.of(taken)))
    summed = KVOutputAggregator(3).aggregate([output(None), *ranks])
    assert summed is not None
    assert summed.kv_connector_output is not None
    stats = summed.kv_connector_output.kv_connector_stats
    assert isinstance(stats, TieredStats)
    assert stats.samples.total("loaded_bytes", "cpu") == 1600
    assert stats.samples.observed("load_seconds", "redis") == [0.3, 0.3]

    sent = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=stats.to_dict()))
    received = MsgpackDecoder(SchedulerStats).decode(sent)
    registry = CollectorRegistry()
    prom_metrics(registry, engines=1).observe(received.kv_connector_stats, 0)
    labels = {"model_name": "m", "engine": "0", "tier": "redis"}
    assert registry.get_sample_value("vllm:lmcache_loaded_bytes_total", labels) == 1200
