"""Samples reach Prometheus as they should, through vLLM's own aggregation."""

from __future__ import annotations

import json

from prometheus_client import CollectorRegistry

from lmcache_connector.metrics.prometheus import TieredStats, log_fields
from lmcache_connector.metrics.samples import Samples
from tests.support.prometheus import prom_metrics


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
        rank = Samples()
        rank.count("loaded_bytes", "cpu", amount=800)
        rank.count("loaded_bytes", "redis", amount=600)
        rank.observe("load_seconds", "redis", value=0.3)
        ranks.append(output(TieredStats.of(rank)))
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


def test_the_log_line_reads_as_one_line() -> None:
    interval = Samples()
    interval.count("queried_tokens", amount=10000)
    interval.count("hit_tokens", "cpu", amount=6144)
    interval.count("hit_tokens", "redis", amount=2048)
    interval.count("prefill_saved_tokens", amount=7168)
    interval.count("recomputed_tokens", amount=1024)
    interval.count("bypassed_requests", "no_salt", amount=3)
    interval.count("loaded_bytes", "redis", amount=32 << 20)
    interval.observe("load_seconds", "redis", value=0.02)
    interval.count("failed_loads", "deadline", amount=2)
    interval.set("cpu_capacity_bytes", "0", value=2 << 30)
    interval.set("cpu_used_bytes", "0", value=1 << 30)
    interval.set("circuit_state", "0", "h:1", value=2)
    line = ", ".join(f"{k}={v}" for k, v in TieredStats.of(interval).reduce().items())
    assert line == (
        "hit tokens=7168 of 10000 (planned: CPU 6144, Redis 2048; lost 1024), "
        "fetched from Redis=32 MiB at 1.7 GB/s, requests not cached=3, failed loads=2, "
        "CPU tier=50% of 2 GiB, Redis=DOWN"
    )
    assert log_fields(Samples()) == {}
