"""Hand-overs on ``/metrics``: every count is told once, under a bounded set of names."""

from __future__ import annotations

import json
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lmcache_connector.metrics.samples import Samples, split_key
from lmcache_connector.metrics.table import METRICS as TIERED
from lmcache_connector.metrics.table import Kind
from lmcache_connector.p2p.connector import LMCacheP2PConnector
from lmcache_connector.p2p.plans import HandoverReport, HandoverResult
from lmcache_connector.p2p.reasons import Reason
from lmcache_connector.p2p.scheduler.adapter import P2PSchedulerAdapter
from lmcache_connector.p2p.scheduler.metrics import METRICS, log_fields
from tests.p2p.scheduler.test_adapter import (
    BLOCK,
    LATE,
    FakeRequest,
    asks_for_decode,
    begin,
    make,
    step,
    wants,
)


def taken(side: P2PSchedulerAdapter) -> Samples:
    samples = side.tally.take()
    assert samples is not None
    return samples


class TestTally:
    def test_a_load_on_two_ranks_counts_tokens_once_and_bytes_twice(self) -> None:
        side, request = make("consumer"), wants("r", 50)
        assert taken(side).gauges == {"p2p_reserved_bytes": 0, "p2p_capacity_bytes": 1000}
        assert side.tally.take() is None
        begin(side, request)
        side.update_state_after_alloc(request, lambda: [1, 2, 3, 4], 50)
        assert taken(side).counters == {"p2p_loads": 1}
        side.update_from_reports(
            [
                HandoverReport((HandoverResult("r", 4, 0.25, 64, 0.125),)),
                HandoverReport((HandoverResult("r", 3, 0.5, 48, 0.125, LATE),)),
            ]
        )
        samples = taken(side)
        assert samples.counters == {
            "p2p_hit_tokens": 48,
            "p2p_recomputed_tokens": 2,
            "p2p_received_bytes": 112,
            "p2p_receive_seconds": 0.25,
            "p2p_failed_loads\ndeadline": 1,
        }
        assert samples.observations == {"p2p_load_seconds": [0.25, 0.5]}
        assert side.tally.take() is None

    def test_reserved_bytes_follow_what_is_promised(self) -> None:
        side = make()
        taken(side)
        first, second = asks_for_decode("1", 7 * BLOCK), asks_for_decode("2", 5 * BLOCK)
        begin(side, first)
        begin(side, second)
        assert taken(side).gauges["p2p_reserved_bytes"] == side.reserved_bytes == 120
        step(side, {first: 7 * BLOCK}, {"1": list(range(7))})
        side.request_finished(second, [], is_served=False)  # it never began
        assert taken(side).gauges["p2p_reserved_bytes"] == 70
        begin(side, asks_for_decode("1", 7 * BLOCK))  # the same name once more
        assert side.reserved_bytes == 70
        for _ in range(2):
            nobody = (("1", Reason.EXPIRED),)
            side.update_from_reports([HandoverReport(released=("1",), unsent=nobody)])
        samples = taken(side)
        assert samples.gauges["p2p_reserved_bytes"] == 0
        assert samples.counters == {"p2p_unsent_handovers\nexpired": 2}

    def test_all_metrics_are_counted_and_nothing_else(self) -> None:
        producer, consumer = make(buffer_blocks=4), make("consumer")
        small, large = asks_for_decode("small", 50), asks_for_decode("large", 100)
        for request in (small, large):
            begin(producer, request)
        step(producer, {small: 50}, {"small": [1, 2, 3, 4]})
        producer.request_finished(small, [1, 2, 3, 4], is_served=True)
        producer.update_from_reports([HandoverReport(unsent=(("small", Reason.EXPIRED),))])
        load = wants("r", 50)
        begin(consumer, load)
        consumer.update_state_after_alloc(load, lambda: [1, 2, 3, 4], 50)
        result = HandoverResult("r", 1, 0.25, 64, 0.125, LATE)
        consumer.update_from_reports([HandoverReport((result,))] * 2)
        begin(consumer, FakeRequest("___prefill_addr_nowhere", [1, 2, 3]))
        full, little = make(buffer_blocks=0), make(buffer_blocks=2)
        begin(full, asks_for_decode("declined", 50))
        begin(little, large)
        step(little, {large: 100}, {"large": list(range(7))})
        samples = taken(producer)
        samples.merge(taken(consumer))
        samples.merge(taken(full))
        samples.merge(taken(little))
        kinds = {
            Kind.COUNTER: set(samples.counters),
            Kind.GAUGE: set(samples.gauges),
            Kind.HISTOGRAM: set(samples.observations),
        }
        for kind, values in kinds.items():
            told = {split_key(key)[0] for key in values}
            assert told == {name for name, metric in METRICS.items() if metric.kind is kind}


class TestPrometheus:
    def test_names_follow_the_conventions(self) -> None:
        for name, metric in METRICS.items():
            assert re.fullmatch(r"p2p_[a-z_]+", name)
            assert metric.documentation.endswith(".")
            assert not name.endswith("_total")
            assert len(metric.labels) == len(metric.known[0])
            if metric.kind is not Kind.COUNTER:
                assert name.endswith(("_seconds", "_bytes"))

    def test_engines_keep_their_own_metrics_beside_the_tiers(self) -> None:
        from lmcache_connector.connector import LMCacheTieredConnector

        registry = CollectorRegistry()
        types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
        config: Any = SimpleNamespace(kv_transfer_config=None)
        labels: dict[int, list[object]] = {i: ["m", str(i)] for i in range(2)}
        names = ["model_name", "engine"]
        prom = LMCacheP2PConnector.build_prom_metrics(config, types, names, labels)
        LMCacheTieredConnector.build_prom_metrics(config, types, names, labels)
        assert not METRICS.keys() & TIERED.keys()

        side = make()
        side.tally.count("p2p_handovers", amount=3)
        side.tally.count("p2p_unsent_handovers", Reason.EXPIRED, amount=2)
        stats = LMCacheP2PConnector.build_kv_connector_stats()
        assert stats.is_empty()
        more = LMCacheP2PConnector.build_kv_connector_stats(taken(side).to_data())
        stats = stats.aggregate(more)
        prom.observe(json.loads(json.dumps(stats.to_dict())), engine_idx=1)

        def value(name: str, engine: str, **labels: str) -> float | None:
            labels |= {"model_name": "m", "engine": engine}
            return registry.get_sample_value(f"vllm:lmcache_p2p_{name}", labels)

        assert (value("handovers_total", "0"), value("handovers_total", "1")) == (0, 3)
        assert value("unsent_handovers_total", "1", reason="expired") == 2
        assert value("failed_loads_total", "1", reason="deadline") == 0
        assert value("capacity_bytes", "1") == 1000

    def test_the_log_line_reads_as_one_line(self) -> None:
        interval = Samples()
        interval.count("p2p_handovers", amount=2)
        interval.count("p2p_loads")
        interval.count("p2p_hit_tokens", amount=4096)
        interval.count("p2p_received_bytes", amount=32 << 20)
        interval.count("p2p_receive_seconds", amount=0.02)
        interval.count("p2p_recomputed_tokens", amount=100)
        interval.count("p2p_failed_loads", "deadline", amount=2)
        interval.count("p2p_failed_loads", "lost")
        interval.set("p2p_reserved_bytes", value=1 << 29)
        interval.set("p2p_capacity_bytes", value=1 << 31)
        stats = LMCacheP2PConnector.build_kv_connector_stats(interval.to_data())
        line = ", ".join(f"{k}={v}" for k, v in stats.reduce().items())
        assert line == (
            "handed over=2 prompts, taken over=4096 tokens by 1 load, "
            "received=32 MiB at 1.7 GB/s, tokens recomputed=100, "
            "failed loads=3 (deadline 2, lost 1), buffer=25% of 2 GiB"
        )
        assert log_fields(Samples()) == {}
