"""Hand-overs on ``/metrics``: every total is told once, under a bounded set of names."""

from __future__ import annotations

import ast
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lmcache_connector.metrics.samples import Samples
from lmcache_connector.metrics.table import METRICS as TIERED
from lmcache_connector.metrics.table import Kind
from lmcache_connector.p2p.connector import LMCacheP2PConnector
from lmcache_connector.p2p.plans import HandoverReport, HandoverResult
from lmcache_connector.p2p.scheduler import counters as reasons
from lmcache_connector.p2p.scheduler.counters import (
    OTHER,
    REASONS,
    UNSENT_REASONS,
    P2PCounters,
    reason_word,
)
from lmcache_connector.p2p.scheduler.metrics import METRICS, P2PMetrics, log_fields
from tests.p2p.scheduler.test_adapter import BLOCK, asks_for_decode, begin, make, step, wants

SOURCES = Path(reasons.__file__).parent


def taken(metrics: P2PMetrics) -> Samples:
    samples = metrics.take()
    assert samples is not None
    return samples


class TestTotals:
    def test_a_load_on_two_ranks_counts_tokens_once_and_bytes_twice(self) -> None:
        side, request = make("consumer"), wants("r", 50)
        metrics = P2PMetrics(side)
        assert taken(metrics).gauges == {"p2p_reserved_bytes": 0, "p2p_capacity_bytes": 1000}
        assert [metrics.take() for _ in range(100)] == [None] * 100
        begin(side, request)
        side.update_state_after_alloc(request, lambda: [1, 2, 3, 4], 50)
        assert taken(metrics).counters == {"p2p_loads": 1}
        late = "it did not come within 9 s"
        side.update_from_reports(
            [
                HandoverReport(0, (HandoverResult("r", 4, 64, 0.25, 64, 0.125),)),
                HandoverReport(1, (HandoverResult("r", 3, 48, 0.5, 48, 0.125, late),)),
            ]
        )
        samples = taken(metrics)
        assert samples.counters == {
            "p2p_hit_tokens": 48,
            "p2p_recomputed_tokens": 2,
            "p2p_received_bytes": 112,
            "p2p_receive_seconds": 0.25,
            "p2p_failed_loads\ndeadline": 1,
        }
        assert samples.observations == {"p2p_load_seconds": [0.25, 0.5]}
        assert metrics.take() is None

    def test_reserved_bytes_follow_what_is_promised(self) -> None:
        side = make()
        metrics = P2PMetrics(side)
        metrics.take()
        first, second = asks_for_decode("1", 7 * BLOCK), asks_for_decode("2", 5 * BLOCK)
        begin(side, first)
        begin(side, second)
        assert taken(metrics).gauges["p2p_reserved_bytes"] == side.reserved_bytes == 120
        step(side, {first: 7 * BLOCK}, {"1": list(range(7))})
        side.request_finished(second, [], is_served=False)  # it never began
        assert taken(metrics).gauges["p2p_reserved_bytes"] == 70
        begin(side, asks_for_decode("1", 7 * BLOCK))  # the same name once more
        assert side.reserved_bytes == 70
        for rank in range(2):
            nobody = (("1", "nobody fetched it in time"),)
            side.update_from_reports([HandoverReport(rank, released=("1",), unsent=nobody)])
        samples = taken(metrics)
        assert samples.gauges["p2p_reserved_bytes"] == 0
        assert samples.counters == {"p2p_unsent_handovers\nexpired": 2}

    def test_every_total_is_told(self) -> None:
        """Whoever adds one thinks of /metrics. Only the tiers have hits of their own; the seconds
        of loads are a histogram."""
        told_elsewhere = {"local_hit_tokens", "load_seconds"}
        for name in P2PCounters.__dataclass_fields__.keys() - told_elsewhere:
            side = make()
            metrics = P2PMetrics(side)
            metrics.take()
            many = isinstance(getattr(side.counters, name), dict)
            setattr(side.counters, name, {"aborted": 1} if many else 1)
            samples = taken(metrics)
            assert list(samples.counters.values()) == [1], name
            assert {key.split("\n")[0] for key in samples.counters} <= METRICS.keys()


class TestReasons:
    @pytest.mark.parametrize(
        ("text", "word"),
        [
            ("10.0.0.1:9 says: its request was aborted", "aborted"),
            ("10.0.0.1:9 says: the producer's buffer is full", "buffer_full"),
            ("10.0.0.1:9 cannot be reached: Connection refused", "unreachable"),
            ("10.0.0.1:9 gave no answer within 2 s", "no_answer"),
            ("10.0.0.1:9 refused: the models differ in weights", "mismatch"),
            ("10.0.0.1:9 refused: you do not know the shared secret", "refused"),
            ("it did not come within 30 s", "deadline"),
            ("the producer was lost: the connection ended", "lost"),
            ("bytes were damaged on the way", "bad_checksum"),
            ("whatever a peer of another version says", "other"),
        ],
    )
    def test_a_text_with_an_address_becomes_a_word(self, text: str, word: str) -> None:
        assert reason_word(text) == word

    def test_every_reason_in_the_source_has_a_word(self) -> None:
        texts = {
            text
            for path in SOURCES.glob("*.py")
            for text in said_reasons(ast.parse(path.read_text()))
        }
        texts -= {"X says: X", " s"}  # around a reason, and behind a number
        assert len(texts) > 20
        assert [text for text in texts if reason_word(text) == OTHER] == []
        assert set(UNSENT_REASONS) <= set(REASONS)

    def test_a_talkative_peer_adds_no_names(self) -> None:
        side = make()
        for number in range(100):
            unsent = (("r", f"reason {number}"),)
            side.update_from_reports([HandoverReport(0, unsent=unsent)])
        assert side.counters.unsent == {OTHER: 100}


_SAYS = {"fail", "decline", "_end", "forget", "_forget", "Gone", "Forget", "Drop", "ProtocolError"}


def said_reasons(tree: ast.AST) -> list[str]:
    """Texts with which a load or a hand-over ends, in calls and in assignments to ``end``."""
    values: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            values += node.args if name in _SAYS else []
        elif isinstance(node, ast.Assign):
            targets = {
                getattr(t, "attr", "") for t in ast.walk(node) if isinstance(t, ast.Attribute)
            }
            values += [*ast.walk(node.value)] if targets & {"end", "failed"} else []  # type: ignore[list-item]
    return [text for value in values if " " in (text := _text(value))]


def _text(value: ast.AST) -> str:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part) or "X" for part in value.values)
    return ""


class TestPrometheus:
    def test_names_follow_the_conventions(self) -> None:
        for name, metric in METRICS.items():
            assert re.fullmatch(r"p2p_[a-z_]+", name)
            assert metric.documentation.endswith(".")
            assert not name.endswith("_total")
            assert len(metric.labels) == len(metric.known[0])
            if metric.kind is not Kind.COUNTER:
                assert name.endswith(("_seconds", "_bytes"))

    def test_engines_keep_their_own_figures_beside_the_tiers(self) -> None:
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
        side.counters.handovers, side.counters.unsent = 3, {"expired": 2}
        stats = LMCacheP2PConnector.build_kv_connector_stats()
        assert stats.is_empty()
        more = LMCacheP2PConnector.build_kv_connector_stats(taken(P2PMetrics(side)).to_data())
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
