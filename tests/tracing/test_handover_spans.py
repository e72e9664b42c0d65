"""Hand-overs are in the trace of the decode instance's request."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_connector.p2p.plans import HandoverReport, HandoverResult
from tests.p2p.scheduler.test_adapter import begin, make, wants
from tests.tracing.test_spans import TRACE, TRACED, Traces


@pytest.fixture
def traces() -> Traces:
    return Traces()


def consumer(traces: Traces) -> tuple[Any, Any]:
    """The scheduler side of a decode instance with two ranks, and its request."""
    side, request = make("consumer"), wants("r", 50)
    side._consuming._spans = traces.spans
    request.trace_headers = TRACED
    begin(side, request)
    return side, request


def arrived(num_blocks: int) -> HandoverReport:
    return HandoverReport((HandoverResult("r", num_blocks, 0.25, 64, 0.125),))


def test_it_begins_with_its_plan_and_ends_with_the_last_rank(traces: Traces) -> None:
    side, request = consumer(traces)
    side.update_state_after_alloc(request, lambda: [1, 2, 3, 4], 50)
    traces.now = 3_000
    side.update_from_reports([arrived(4)])
    assert traces.take() == []
    traces.now = 5_000
    side.update_from_reports([arrived(3)])
    (span,) = traces.take()
    assert span.name == "lmcache.handover"
    assert span.context is not None
    assert span.context.trace_id == TRACE
    assert (span.start_time, span.end_time) == (1_000, 5_000)
    assert span.attributes == {"lmcache.blocks": 4, "lmcache.blocks_done": 3}
    assert len(traces.spans) == 0


def test_one_that_is_not_needed_or_aborted_leaves_nothing(traces: Traces) -> None:
    side, request = consumer(traces)
    side.update_state_after_alloc(request, lambda: [], 0)
    assert len(traces.spans) == 0
    side, request = consumer(traces)
    side.update_state_after_alloc(request, lambda: [1, 2, 3, 4], 50)
    side.request_finished(request, [], is_served=False)
    side.update_from_reports([arrived(4), arrived(4)])
    assert traces.take() == []
    assert len(traces.spans) == 0
