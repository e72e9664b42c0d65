"""Samples add up over ranks, steps and engines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from lmcache_connector.cost_model.decision import Reason
from lmcache_connector.metrics.prometheus import TieredStats, log_fields
from lmcache_connector.metrics.samples import Samples, Tally
from lmcache_connector.metrics.table import METRICS, Kind
from lmcache_connector.plans import Outcome
from lmcache_connector.storage.chunk_codec import ValueFault
from lmcache_connector.storage.redis.counters import WriteEnd
from tests.support.prometheus import prom_metrics

# Numbers whose float sums are exact, in any order.
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
def test_samples_add_up_in_any_grouping(parts: list[Samples], cut: int) -> None:
    one_by_one, head, tail = Samples(), Samples(), Samples()
    for index, part in enumerate(parts):
        one_by_one.merge(part)
        (head if index < cut else tail).merge(part)
    head.merge(Samples(**json.loads(json.dumps(tail.to_data()))))
    assert head == one_by_one
    assert head.total("loaded_bytes") == sum(p.total("loaded_bytes") for p in parts)


counts = st.tuples(st.sampled_from(["cpu", "redis"]), st.integers(0, 1 << 20))


@given(st.lists(st.one_of(counts, st.none()), max_size=30))
def test_samples_taken_and_left_add_up_to_the_totals(steps: list[tuple[str, int] | None]) -> None:
    """``None``: take the new samples."""
    tally, taken = Tally(), Samples()
    for step in steps:
        if step is None:
            taken.merge(tally.take() or Samples())
        else:
            tier, amount = step
            tally.count("loaded_bytes", tier, amount=amount)
    taken.merge(tally.take() or Samples())
    amounts = [step for step in steps if step is not None]
    for tier in ("cpu", "redis"):
        expected = sum(amount for label, amount in amounts if label == tier)
        assert taken.total("loaded_bytes", tier) == expected
        assert tally.totals.total("loaded_bytes", tier) == expected
    assert tally.totals.total("loaded_bytes") == sum(amount for _, amount in amounts)


# -- the table -------------------------------------------------------------------------------------


ENUMS: dict[str, Iterable[Enum]] = {
    "redis_chunks": ValueFault,
    "failed_loads": set(Outcome) - {Outcome.DONE},
    "failed_stores": set(Outcome) - {Outcome.DONE},
    "decisions": Reason,
    "dropped_writes": (WriteEnd.QUEUE_FULL, WriteEnd.FAILED),
}
"""Values of labels; rates and increases need their series before the first event."""


def test_names_follow_the_conventions() -> None:
    """https://prometheus.io/docs/practices/naming: histograms end with a base unit. ``_total`` is
    left out, because the client library adds it."""
    units = ("bytes", "seconds", "tokens", "bytes_per_second", "jobs", "chunks")
    for metric in METRICS.values():
        assert re.fullmatch(r"vllm:lmcache_[a-z0-9_]+", metric.full_name)
        assert not metric.name.endswith("_total")
        assert metric.documentation.endswith(".")
        words = set(metric.name.split("_"))
        assert words.isdisjoint({"ms", "kib", "mib", "gib"})
        if metric.kind is Kind.HISTOGRAM or words & {"bytes", "seconds"}:
            assert metric.name.endswith(units)
        assert list(metric.buckets) == sorted(metric.buckets)
    assert all(name == metric.name for name, metric in METRICS.items())


@pytest.mark.parametrize("name", ENUMS)
def test_series_of_alerts_exist_from_the_start(name: str) -> None:
    known = {labels[0] for labels in METRICS[name].known}
    assert {one.value for one in ENUMS[name]} <= known


def test_readers_of_one_interval_add_to_it_without_changing_it() -> None:
    """vLLM hands the same data to the loggers of all engines."""
    first, second = Samples({"lookups": 1}, {}, {"load_seconds": [0.1]}), Samples({"lookups": 2})
    readers = [TieredStats(first.to_data()) for _ in range(2)]
    for reader in readers:
        reader.aggregate(TieredStats(second.to_data()))
        assert Samples(**reader.data).total("lookups") == 3
    assert first.counters == {"lookups": 1}
    readers[0].aggregate(TieredStats({"observations": {"load_seconds": [0.2]}}))
    assert first.observations == {"load_seconds": [0.1]}


# -- Prometheus ------------------------------------------------------------------------------------


def test_prometheus_gets_each_engine_and_rank() -> None:
    registry = CollectorRegistry()
    prom = prom_metrics(registry, engines=2)
    ranks = [Samples(), Samples()]
    for index, rank in enumerate(ranks):
        rank.count("loaded_bytes", "cpu", amount=100)
        rank.set("cpu_used_bytes", str(index), value=10 + index)
        rank.observe("load_seconds", "cpu", value=0.002)
    scheduler = Samples()
    scheduler.count("hit_tokens", "cpu", amount=256)
    stats = TieredStats(ranks[0].to_data())
    for other in (ranks[1], scheduler):
        stats = stats.aggregate(TieredStats(other.to_data()))
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


def test_vllm_sums_the_ranks_and_sends_the_sum() -> None:
    """By vLLM's own aggregation and serialisation. One rank has no samples."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    def output(stats: TieredStats | None) -> ModelRunnerOutput:
        told = KVConnectorOutput(kv_connector_stats=stats)
        return ModelRunnerOutput([], {}, kv_connector_output=told)

    ranks = []
    for _ in range(2):
        rank = Samples()
        rank.count("loaded_bytes", "cpu", amount=800)
        rank.count("loaded_bytes", "redis", amount=600)
        rank.observe("load_seconds", "redis", value=0.3)
        ranks.append(output(TieredStats(rank.to_data())))
    summed = KVOutputAggregator(3).aggregate([output(None), *ranks])
    assert summed is not None
    assert summed.kv_connector_output is not None
    stats = summed.kv_connector_output.kv_connector_stats
    assert isinstance(stats, TieredStats)
    assert Samples(**stats.data).total("loaded_bytes", "cpu") == 1600
    assert Samples(**stats.data).observed("load_seconds", "redis") == [0.3, 0.3]

    sent = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=stats.to_dict()))
    received = MsgpackDecoder(SchedulerStats).decode(sent)
    registry = CollectorRegistry()
    prom_metrics(registry, engines=1).observe(received.kv_connector_stats, 0)
    labels = {"model_name": "m", "engine": "0", "tier": "redis"}
    assert registry.get_sample_value("vllm:lmcache_loaded_bytes_total", labels) == 1200


def test_the_log_is_one_line() -> None:
    interval = Samples()
    interval.count("queried_tokens", amount=10000)
    interval.count("hit_tokens", "cpu", amount=6144)
    interval.count("hit_tokens", "redis", amount=2048)
    interval.count("hit_tokens", "peer", amount=512)
    interval.count("loaded_bytes", "peer", amount=2 << 20)
    interval.count("prefill_saved_tokens", amount=7168)
    interval.count("recomputed_tokens", amount=1024)
    interval.count("bypassed_requests", "no_salt", amount=3)
    interval.count("loaded_bytes", "redis", amount=32 << 20)
    interval.observe("load_seconds", "redis", value=0.02)
    interval.count("failed_loads", "deadline", amount=2)
    interval.set("cpu_capacity_bytes", "0", value=2 << 30)
    interval.set("cpu_used_bytes", "0", value=1 << 30)
    interval.set("circuit_state", "0", "h:1", value=2)
    line = ", ".join(f"{k}={v}" for k, v in TieredStats(interval.to_data()).reduce().items())
    assert line == (
        "hit tokens=7168 of 10000 (planned: CPU 6144, peers 512, Redis 2048; lost 1024), "
        "fetched from peers=2 MiB, "
        "fetched from Redis=32 MiB at 1.7 GB/s, requests not cached=3, failed loads=2, "
        "CPU tier=50% of 2 GiB, Redis or a peer=DOWN"
    )
    assert log_fields(Samples()) == {}
