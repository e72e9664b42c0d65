"""Spans for lookups, loads, stores and audits, if vLLM exports traces.

A client that sends a ``traceparent`` has a trace; vLLM passes its headers on with the request. A
span is created when its operation has ended, with its start and end time, so none stays open. No
other process is involved. Runs on the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from lmcache_connector.vllm_compat.api.names import Request, VllmConfig

_PREFIX = "lmcache."
Attributes = Mapping[str, str | int | float]


class Spans:
    """Exports through ``tracer``; without one, nothing is recorded. ``clock_ns`` reads nanoseconds
    since 1970, as spans need them."""

    def __init__(
        self, tracer: Tracer | None = None, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._tracer = tracer
        self._clock_ns = clock_ns
        self._begun: dict[str, dict[str, int]] = {}  # by request

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    def begin(self, request: Request, operation: str) -> None:
        """``operation``: ``lookup``, or a job's kind and id, as in ``load 7``. A second beginning
        before the end is ignored."""
        if self.is_on and request.trace_headers:
            self._begun.setdefault(request.request_id, {}).setdefault(operation, self._clock_ns())

    def end(self, request: Request, operation: str, attributes: Attributes) -> None:
        """The operation has ended. Ignored without a beginning."""
        if self._tracer is None or (started := self._take(request, operation)) is None:
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            _PREFIX + operation.partition(" ")[0],
            context=TraceContextTextMapPropagator().extract(request.trace_headers),
            attributes={_PREFIX + name: value for name, value in attributes.items()},
            start_time=started,
        )
        span.end(self._clock_ns())

    def drop(self, request: Request, operation: str) -> None:
        """Forget an operation that will not end."""
        self._take(request, operation)

    def drop_all(self) -> None:
        self._begun.clear()

    def _take(self, request: Request, operation: str) -> int | None:
        begun = self._begun.get(request.request_id, {})
        started = begun.pop(operation, None)
        if started is not None and not begun:
            del self._begun[request.request_id]
        return started


def make_spans(vllm_config: VllmConfig) -> Spans:
    """Spans if vLLM exports traces; vLLM has then created the exporter, or refused to start."""
    if vllm_config.observability_config.otlp_traces_endpoint is None:
        return Spans()
    from opentelemetry import trace

    return Spans(trace.get_tracer("lmcache_connector"))
