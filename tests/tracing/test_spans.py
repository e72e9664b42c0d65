"""Spans of a request are exported in its trace; without a trace there are none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lmcache_connector.tracing.spans import Spans
from tests.support.doubles.lives import CHUNK, prompt
from tests.support.doubles.shadow_engine import ShadowEngine, Shape

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
TRACED = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-00"}


class Traces:
    """A ``Spans`` and its exported spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.now = 1_000
        self.spans = Spans(provider.get_tracer("test"), lambda: self.now)

    def take(self) -> list[ReadableSpan]:
        finished = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return finished


@pytest.fixture
def traces() -> Traces:
    return Traces()


def request(name: str = "r", headers: dict[str, str] | None = None) -> Any:
    return SimpleNamespace(request_id=name, trace_headers=headers)


def test_a_span_has_its_requests_trace_and_times(traces: Traces) -> None:
    one = request(headers=TRACED)
    traces.spans.begin(one, "load 7")
    traces.now = 5_000
    traces.spans.end(one, "load 7", {"chunks": 3})
    (span,) = traces.take()
    assert span.name == "lmcache.load"
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)
    assert (span.start_time, span.end_time) == (1_000, 5_000)
    assert span.attributes == {"lmcache.chunks": 3}
    assert not traces.spans._begun


@pytest.mark.parametrize("headers", [None, {}, NOT_SAMPLED])
def test_a_request_without_a_sampled_trace_exports_nothing(
    traces: Traces, headers: dict[str, str] | None
) -> None:
    one = request(headers=headers)
    traces.spans.begin(one, "lookup")
    traces.spans.end(one, "lookup", {})
    assert traces.take() == []
    assert not traces.spans._begun


def test_dropped_spans_leave_nothing(traces: Traces) -> None:
    one = request(headers=TRACED)
    traces.spans.begin(one, "lookup")
    traces.spans.drop(one, "lookup")
    traces.spans.end(one, "lookup", {})
    assert traces.take() == []
    assert not traces.spans._begun


@pytest.mark.parametrize("world_size", [1, 2])
def test_look_up_store_and_load_are_in_the_trace(
    model: Path, traces: Traces, world_size: int
) -> None:
    engine = ShadowEngine(model, Shape(world_size=world_size, prefix_caching=False), 0)
    engine.adapter.spans = traces.spans
    for _ in range(2):
        engine.add(prompt(1, 4 * CHUNK + 1), 1, trace_headers=TRACED)
        engine.run_until_idle()
    spans = traces.take()
    assert {span.context.trace_id for span in spans if span.context} == {TRACE}
    found = [(span.name, dict(span.attributes or {})) for span in spans]
    looked_up = [attributes for name, attributes in found if name == "lmcache.lookup"]
    assert [each["lmcache.hit_tokens"] for each in looked_up] == [0, 4 * CHUNK]
    stored = [attributes for name, attributes in found if name == "lmcache.store"]
    assert sum(int(str(each["lmcache.chunks_done"])) for each in stored) == 4
    (loaded,) = [attributes for name, attributes in found if name == "lmcache.load"]
    assert loaded["lmcache.chunks_done"] == loaded["lmcache.chunks"] == 4
    assert loaded["lmcache.outcome"] == "done"
    engine.check_whole()
    assert not traces.spans._begun


def test_the_first_request_after_a_reset_is_in_the_trace(model: Path, traces: Traces) -> None:
    """The request comes before the weights have been read again."""
    engine = ShadowEngine(model, Shape(prefix_caching=False), 0)
    engine.adapter.spans = traces.spans
    assert engine.reset(new_weights=False)
    engine.add(prompt(1, 4 * CHUNK), 1, trace_headers=TRACED)
    engine.run_until_idle()
    assert "lmcache.lookup" in {span.name for span in traces.take()}
    engine.check_whole()
    assert not traces.spans._begun
